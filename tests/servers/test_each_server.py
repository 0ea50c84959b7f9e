"""Each real server: its kind, a vote and a small evaluation, whatever the server lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot import SelfConsistency, Task, solve
from tot.cli.app import main
from tot.decoders.remote.servers import SERVERS

pytestmark = pytest.mark.real

KINDS = {"transformers_server": "openai", "vllm_server": "vllm", "llama_server": "openai"}


class Fruit(Task):
    """A task whose answers are single words."""

    templates = {"chain": "{{ question }} Why?", "answer": "{{ question }} One word."}  # noqa: RUF012
    sampling = {"chain": {"max_tokens": 16}, "answer": {"max_tokens": 4}}  # noqa: RUF012


def test_each_server_is_recognized(
    each_server: Any, remote: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    assert remote(each_server).server is SERVERS[KINDS[request.node.callspec.params["each_server"]]]


def test_a_vote_runs_on_each_server(each_server: Any, remote: Callable[..., Any]) -> None:
    decoder = remote(each_server)
    search = SelfConsistency(samples=3)
    solution = solve(Fruit, "Name a fruit.", decoder=decoder, search=search, evaluator="random", seed=3)
    thoughts = [node.thought.parts["chain"] for node in solution.tree if node.thought is not None]
    assert (len(thoughts), len(set(thoughts)) > 1) == (3, True)
    assert solution.answer is not None
    assert 6 <= solution.usage.new_tokens <= 3 * (16 + 4)


def test_two_rows_are_evaluated_on_each_server(
    each_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {a} + {a}?", "answer": str(2 * a)} for a in (2, 3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--search", "self-consistency:samples=2", "--evaluator", "random", "--max-tokens", "24"]
    flags += ["--model", each_server.model, "--decoder", "openai", "--decoder-option", f"base_url={each_server.url}"]
    assert main(["eval", "gsm8k", "--data", "rows.jsonl", *flags, "--out", "out"]) == 0
    results = json.loads(Path("out/results.json").read_text())
    assert (results["samples"], results["errors"]) == (2, 0)
    assert results["by_purpose"]["generate"]["calls"] == 4
    assert 0 < results["tokens"] <= 2 * 2 * 24
