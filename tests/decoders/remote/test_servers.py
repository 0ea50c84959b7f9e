"""The table of servers: how each kind is recognized, the effect of its differences, and the report of `tot models`."""

from __future__ import annotations

from typing import Any

import pytest

from tot import SelfConsistency, solve
from tot.cli.app import main
from tot.decoders import Message, OptionError, Request, Sampling
from tot.decoders.remote.servers import SERVERS, recognized


def chat(*texts: str) -> tuple[Message, ...]:
    """Return messages with alternating roles, the user's first."""
    return tuple(Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts))


def ask(**sampling: Any) -> Request:
    return Request(prompt=chat("q"), sampling=Sampling(temperature=1.0, **sampling))


@pytest.mark.parametrize(
    ("models", "name"),
    [
        ([{"id": "m", "owned_by": "vllm"}], "vllm"),
        ([{"id": "m", "owned_by": "sglang"}], "sglang"),
        ([{"id": "m", "owned_by": "llamacpp"}], "llama-server"),
        ([{"id": "a", "owned_by": "me"}, {"id": "b", "owned_by": "library"}], "ollama"),
        ([{"id": "m", "owned_by": "tot", "tot": {"decoder": "ar"}}], "tot"),
        ([{"id": "m", "owned_by": "tot"}], "openai"),  # searches in front of another server
        ([{"id": "m", "owned_by": None, "tot": 3}, {"id": "n"}], "openai"),
        ([], "openai"),
    ],
)
def test_a_server_is_recognized_by_its_list_of_models(models: list[dict[str, Any]], name: str) -> None:
    assert recognized(models) is SERVERS[name]


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("min_p", 0.1)])
def test_a_filter_is_sent_refused_or_sent_with_one_warning(
    server: Any, remote: Any, caplog: Any, name: str, value: float
) -> None:
    for kind in ("vllm", "openai"):
        decoder = remote(server=kind)
        decoder.generate([ask(**{name: value}), ask(**{name: value}, seed=1)])
    assert [asked.body[name] for asked in server.posts] == [value] * 4
    assert caplog.text.count(f"may ignore {name}") == 1
    with pytest.raises(OptionError, match=f"Ollama ignores {name}: leave {name} out"):
        remote(server="ollama").generate([ask(**{name: value})])
    assert len(server.posts) == 4


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("vllm", True), ("sglang", True), ("tot", True), ("llama-server", False), ("ollama", False), ("openai", False)],
)
def test_a_last_assistant_message_is_continued(server: Any, remote: Any, caplog: Any, kind: str, fields: bool) -> None:
    server.reply = lambda path, body: [{"text": " 42."}]
    request = Request(prompt=chat("q", "The answer is"))
    completions = remote(server=kind).generate([request] * 2)
    sent = {"continue_final_message": True, "add_generation_prompt": False}
    assert all((sent.items() <= asked.body.items()) is fields for asked in server.posts)
    assert [one.text for one in completions] == [" 42."] * 2
    assert caplog.text.count("is not known to continue an assistant message") == (kind == "openai")


def test_a_prefix_that_another_server_repeats_is_removed(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": " The answer is 42."}]
    request = Request(prompt=chat("q", "The answer is "))
    assert [remote(server=kind).generate([request])[0].text for kind in ("openai", "vllm")] == [
        "42.",
        " The answer is 42.",
    ]


@pytest.mark.parametrize("kind", ["vllm", "ollama", "openai"])
def test_a_vote_runs_on_each_server(server: Any, kind: str) -> None:
    server.takes_n = kind == "vllm"
    server.reply = lambda path, body: [{"text": "The answer is 7."}] * (body.get("n", 1) if kind == "vllm" else 1)
    where: dict[str, Any] = {"model": "tiny", "decoder": "openai", "base_url": server.url, "server": kind}
    solution = solve("gsm8k", "How many?", search=SelfConsistency(samples=4), evaluator="random", **where)
    assert solution.answer == "7"
    assert [asked.body.get("n", 1) for asked in server.posts] == ([4] if kind == "vllm" else [4, 1, 1, 1])


def test_tot_models_reports_a_server(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.owner, server.models = "library", ["small", "large"]
    assert main(["models", "--server", server.url]) == 0
    rows = [[cell for cell in line.split("  ") if cell.strip()] for line in capsys.readouterr().out.splitlines()]
    assert {row[0]: row[-1].strip() for row in rows} == {
        "server": "Ollama",
        "top_k, min_p": "refused: leave them out",
        "choices": "the model writes a choice",
        "continued assistant message": "used",
        "stop strings of generator=continue": "the server writes whole texts, which are split here",
        "models": "small, large",
    }
    assert main(["models", "--server", "http://127.0.0.1:1/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err
