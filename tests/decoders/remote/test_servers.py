"""The differences of servers: the table, stop strings that stay in the text, and continued messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, Model, Random, SelfConsistency, Solution, Task, solve
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


@pytest.mark.parametrize("kind", ["vllm", "ollama", "openai"])
def test_a_vote_runs_on_each_server(server: Any, kind: str) -> None:
    server.takes_n = kind == "vllm"
    server.reply = lambda path, body: [{"text": "The answer is 7."}] * (body.get("n", 1) if kind == "vllm" else 1)
    model = Model("tiny", "openai", {"base_url": server.url, "server": kind})
    solution = solve("gsm8k", "How many?", model=model, search=SelfConsistency(samples=4), evaluator="random")
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
        "tools": "sent",
        "thinking": "sent as reasoning_effort",
        "thinking that spends its budget": "dropped: the answer is requested without thinking",
        "models": "small, large",
    }
    assert main(["models", "--server", "http://127.0.0.1:1/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err


WHOLE = "First we add.\n\n\nSo 3 + 4 = 7. Right?\n\nThe answer is 7."
PIECES = ["First we add.\n\n\n", "So 3 + 4 = 7. Right?\n\n", "The answer is 7."]
KINDS = ["vllm", "sglang", "llama-server"]
"""Servers that report a stop string as `stop_reason`, as `matched_stop`, and not at all."""


class Chain(Task):
    """A task with one message, in pieces."""

    thought = ("step",)
    depth = 9
    templates: ClassVar = {
        "step": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}",
        "answer": "{{ question }}",
    }


class Writer:
    """Continue the assistant's text up to the first stop string, and report the stop as a kind of server does."""

    def __init__(self, kind: str, whole: str = WHOLE) -> None:
        self.kind = kind
        self.whole = whole

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        last = body["messages"][-1]
        prefix = last["content"] if last["role"] == "assistant" else ""
        assert self.whole.startswith(prefix)
        rest = self.whole[len(prefix) :]
        at, stop = min(((rest.find(stop), stop) for stop in body.get("stop", ()) if stop in rest), default=(None, None))
        fields: dict[str, Any] = {"finish_reason": "stop"}
        if self.kind == "vllm":
            fields["stop_reason"] = stop
        if self.kind == "sglang":
            fields["matched_stop"] = 2 if stop is None else stop
        return [{"text": rest[:at], **fields}] * body.get("n", 1)


def solved(decoder: Any, until: str = "paragraph") -> Solution:
    return solve(
        Chain(),
        "why",
        decoder=decoder,
        search=BFS(thoughts=1, breadth=1),
        generator=Continue(temperature=0.0, until=until),
        evaluator=Random(),
    )


def path(solution: Solution) -> list[str]:
    return [node.thought.text for node in solution.tree if node.thought]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_split_into_its_pieces(server: Any, remote: Any, kind: str) -> None:
    server.reply = Writer(kind)
    solution = solved(remote(server=kind))
    assert "".join(path(solution)) == WHOLE
    assert [piece.split() for piece in path(solution)] == [piece.split() for piece in PIECES]
    assert [node.thought.ended for node in solution.tree if node.thought] == [False, False, True]
    assert (solution.parse_failures, solution.answer, len(server.posts)) == (0, WHOLE, 3)
    assert ["stop" in post.body for post in server.posts] == [kind != "llama-server"] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("whole", "until", "pieces"),
    [
        ("Is it 7? It is! Yes. It is 7.", "sentence", ["Is it 7?", " It is!", " Yes.", " It is 7."]),
        ("a; b; c", "; ", ["a;", " b;", " c"]),
    ],
)
def test_pieces_keep_their_end_mark_and_leave_the_space_to_the_next_word(
    server: Any, remote: Any, kind: str, whole: str, until: str, pieces: list[str]
) -> None:
    server.reply = Writer(kind, whole)
    assert path(solved(remote(server=kind), until)) == pieces


def completion_of(remote: Callable[..., Any], kind: str, **sampling: Any) -> Any:
    prompt = (Message(role="user", content="why"),)
    request = Request(prompt=prompt, sampling=Sampling(keep_stop=True, **sampling))
    (completion,) = remote(server=kind).generate([request])
    return completion


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_after_leading_whitespace_does_not_end_a_text(server: Any, remote: Any, kind: str) -> None:
    server.reply = Writer(kind, "\n\n First.\n\n Then.")
    completion = completion_of(remote, kind, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("\n\n First.\n\n", "stop")
    again = kind != "llama-server"  # the whole text is needed
    assert (len(server.posts), completion.usage.new_tokens) == ((2, 6) if again else (1, 3))


def test_a_whole_text_that_ends_in_a_stop_string_ended_by_itself(server: Any, remote: Any) -> None:
    server.reply = Writer("llama-server", "All.\n\n")
    completion = completion_of(remote, "llama-server", stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("All.\n\n", "eos")


def test_continue_is_refused_on_a_server_that_is_not_known_to_continue(server: Any, remote: Any) -> None:
    with pytest.raises(OptionError, match=r"is not known to continue an assistant message.*use generator=sample") as e:
        solved(remote())
    assert ("\n" in str(e.value), server.posts) == (False, [])
