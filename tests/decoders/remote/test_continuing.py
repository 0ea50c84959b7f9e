"""Texts in pieces through servers: stop strings that stay in the text, and messages that the server continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, Random, Solution, Task, solve
from tot.decoders import Message, OptionError, Request, Sampling

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_that_reaches_its_limit_reports_length(server: Any, remote: Any, kind: str) -> None:
    server.reply = lambda path, body: [{"text": "So 3", "finish_reason": "length"}]
    completion = completion_of(remote, kind, stop=("\n\n",))
    assert (completion.text, completion.finish_reason, len(server.posts)) == ("So 3", "length", 1)


def test_continue_is_refused_on_a_server_that_is_not_known_to_continue(server: Any, remote: Any) -> None:
    with pytest.raises(OptionError, match=r"is not known to continue an assistant message.*use generator=sample") as e:
        solved(remote())
    assert ("\n" in str(e.value), server.posts) == (False, [])
