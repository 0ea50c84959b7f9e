"""Searches on doubles of Ollama and LM Studio, directly and through `tot serve`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tot import Budget, SelfConsistency, solve
from tot.cli.app import main

QUESTION = "Ann has 3 apples and buys 4 more. How many apples does she have?"
Serve = Callable[[Any], str]


def test_a_vote_runs_on_each_server(double: Any, serve: Serve) -> None:
    logprobs = "logprobs" not in double.ignores
    where: Any = {"model": "qwen3:8b", "decoder": "openai", "base_url": serve(double), "logprobs": logprobs}
    search = SelfConsistency(samples=5, weighted=True)
    if logprobs:
        solution = solve("gsm8k", QUESTION, search=search, evaluator="logprob", **where)
    else:
        with pytest.warns(UserWarning, match="votes count equally"):
            solution = solve("gsm8k", QUESTION, search=search, evaluator="logprob", **where)
    assert solution.answer == "7"
    values = [node.value for node in solution.tree if node.thought is not None]
    assert len(values) == 5
    assert all(0 < value < 1 for value in values) if logprobs else values == [1.0] * 5
    assert [body.get("n", 1) for body in double.posts] == [5, 1, 1, 1, 1]
    assert len({body["seed"] for body in double.posts}) == 5


def test_two_rows_are_evaluated_on_each_server(
    double: Any, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": QUESTION, "answer": "7"}, {"question": f"{QUESTION} Think.", "answer": "9"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--search", "self-consistency:samples=5", "--evaluator", "random", "--model", "qwen3:8b"]
    flags += ["--decoder", "openai", "--decoder-option", f"base_url={serve(double)}"]
    assert main(["eval", "gsm8k", "--data", "rows.jsonl", *flags, "--out", "out"]) == 0
    results = json.loads(Path("out/results.json").read_text())
    assert (results["samples"], results["errors"], results["score"]["mean"]) == (2, 0, 0.5)


def test_a_chosen_seed_that_the_server_ignores_is_reported_once(
    double: Any, lm_studio: type[Any], serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    where: Any = {"model": "qwen3:8b", "decoder": "openai", "base_url": serve(double)}
    for seed in (0, 5):
        search = SelfConsistency(samples=3)
        solution = solve("gsm8k", QUESTION, search=search, evaluator="random", seed=seed, **where)
        assert solution.answer == "7"
        ignored = [text for text in caplog.messages if "ignores the seed: its samples are not reproducible" in text]
        assert len(ignored) == (seed == 5 and isinstance(double, lm_studio))


def test_a_probe_is_not_part_of_a_search_and_its_budget(double: Any, serve: Serve) -> None:
    where: Any = {"model": "qwen3:8b", "decoder": "openai", "base_url": serve(double)}
    search = SelfConsistency(samples=3)
    solution = solve("gsm8k", QUESTION, search=search, evaluator="random", seed=5, budget=Budget(tokens=50), **where)
    assert sum(body["max_tokens"] for body in double.posts if "random words" in str(body)) > 50
    assert (solution.stopped, solution.usage.new_tokens) == (None, 3 * 9)  # "3 + 4 = 7. The answer is 7."


@pytest.mark.processes
def test_tot_serve_in_front_of_each_server_votes_and_reports_what_is_missing(
    double: Any, lm_studio: type[Any], serve: Serve, python: Any
) -> None:
    options = ("--model", "qwen3:8b", "--decoder-option", f"base_url={serve(double)}", "--port", "0")
    process = python("-m", "tot.cli.app", "serve", "--decoder", "openai", *options)
    lines: list[str] = []
    while not lines or "served at" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    missing = "seed, min_p, logprobs" if isinstance(double, lm_studio) else "top_k, min_p, logprobs of given"
    assert sum(f"lacks several samples a request, {missing}" in line for line in lines) == 1
    url = lines[-1].split()[-1]
    probes = len(double.posts)
    with openai.OpenAI(base_url=url, api_key="any") as client:
        for _ in range(2):
            messages: Any = [{"role": "user", "content": QUESTION}]
            reply = client.chat.completions.create(model="qwen3:8b:vote", messages=messages)
            assert str(reply.choices[0].message.content).startswith("3 + 4 = 7. The answer is ")
            assert "warning" not in reply.tot
        seeded = client.chat.completions.create(model="qwen3:8b:vote", messages=messages, seed=5).tot
    warning = "the server behind qwen3:8b ignores seed: samples differ from run to run"
    ignored = (None, warning) if isinstance(double, lm_studio) else (5, None)
    assert (seeded["seed"], seeded.get("warning")) == ignored
    assert len(double.posts) > probes
    assert all("random words" not in body["messages"][0]["content"] for body in double.posts[probes:])
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
