"""Texts in pieces through servers: stop strings that stay in the text, and messages that the server is to continue.

`Writer` writes one message, and shows where it stopped in the way of one kind of server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, Random, Solution, Task, solve
from tot.decoders import Message, OptionError, Request, Sampling

WHOLE = "First we add.\n\n\nSo 3 + 4 = 7. Right?\n\nThe answer is 7."
PIECES = ["First we add.\n\n\n", "So 3 + 4 = 7. Right?\n\n", "The answer is 7."]


class Chain(Task):
    """One message, in pieces."""

    thought = ("step",)
    depth = 9
    templates: ClassVar = {
        "step": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}",
        "answer": "{{ question }}",
    }


class Writer:
    """Continues the assistant's text to the first stop string. `how` says what the server shows of that."""

    def __init__(self, how: str, whole: str = WHOLE) -> None:
        self.how = how
        self.whole = whole

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if self.how == "strict" and "include_stop_str_in_output" in body:
            return 400, {"error": {"message": "Unrecognized request argument: include_stop_str_in_output"}}
        if self.how == "gruff" and "include_stop_str_in_output" in body:
            return 422, {"detail": "extra_forbidden"}
        last = body["messages"][-1]
        said = last["content"] if last["role"] == "assistant" else ""
        assert self.whole.startswith(said) or said.endswith(", 1"), said
        rest = self.whole[len(said) :]
        hits = [(at, stop) for stop in body.get("stop", ()) if (at := rest.find(stop)) >= 0]
        at, stop = min(hits) if hits else (len(rest), None)
        keeps = self.how == "vllm" and body.get("include_stop_str_in_output")
        text = rest[: at + len(stop)] if keeps and stop else rest[:at]
        fields: dict[str, Any] = {"finish_reason": "stop"}
        if self.how in ("vllm", "tells"):
            fields["stop_reason"] = stop
        if self.how == "sglang":
            fields["matched_stop"] = 2 if stop is None else stop
        if self.how == "tgi":
            fields["finish_reason"] = "eos_token" if stop is None else "stop_sequence"
        if self.how == "repeats":
            text = said + text
        return [{"text": text, **fields}] * body.get("n", 1)


def grown(decoder: Any, until: str = "paragraph") -> Solution:
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


# -- stop strings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["vllm", "tells", "sglang", "tgi", "silent", "strict", "gruff"])
def test_a_message_is_cut_into_its_pieces_however_the_server_shows_its_stops(
    server: Any, remote: Any, how: str
) -> None:
    server.reply = Writer(how)
    solution = grown(remote())
    assert "".join(path(solution)) == WHOLE
    assert [piece.split() for piece in path(solution)] == [piece.split() for piece in PIECES]
    assert [node.thought.ended for node in solution.tree if node.thought] == [False, False, True]
    assert solution.parse_failures == 0
    assert solution.answer == WHOLE


@pytest.mark.parametrize(("how", "requests"), [("vllm", 3), ("tells", 3), ("silent", 4)])
def test_few_requests_more_than_pieces_are_needed(server: Any, remote: Any, how: str, requests: int) -> None:
    server.reply = Writer(how, "One.\n\nTwo.\n\nThree.") if how == "vllm" else Writer(how)
    grown(remote())
    assert len(server.posts) == requests


def test_a_silent_server_is_asked_for_whole_texts_from_then_on_and_that_is_said(
    server: Any, remote: Any, caplog: Any
) -> None:
    server.reply = Writer("silent")
    decoder = remote()
    grown(decoder)
    grown(decoder)
    assert ["stop" in post.body for post in server.posts] == [True] + [False] * 6
    assert caplog.text.count("does not report which stop string ended a text") == 1
    first = server.posts[0].body, server.posts[1].body
    assert first[1] == {name: first[0][name] for name in first[0] if name not in ("stop", "include_stop_str_in_output")}


@pytest.mark.parametrize("how", ["vllm", "tells", "sglang", "silent", "tgi"])
def test_sentences_keep_the_mark_that_ended_them_and_leave_the_space_to_the_next_word(
    server: Any, remote: Any, how: str
) -> None:
    server.reply = Writer(how, "Is it 7? It is! Yes. It is 7.")
    solution = grown(remote(), "sentence")
    assert path(solution) == ["Is it 7?", " It is!", " Yes.", " It is 7."]


def test_a_stop_string_of_ones_own_stays_too(server: Any, remote: Any) -> None:
    server.reply = Writer("tells", "a; b; c")
    assert path(grown(remote(), "; ")) == ["a;", " b;", " c"]


def drawn(remote: Callable[..., Any], **sampling: Any) -> Any:
    prompt = (Message(role="user", content="why"),)
    (completion,) = remote().generate([Request(prompt=prompt, sampling=Sampling(keep_stop=True, **sampling))])
    return completion


@pytest.mark.parametrize("how", ["vllm", "tells", "sglang", "silent", "tgi"])
def test_a_stop_string_after_blanks_alone_ends_nothing(server: Any, remote: Any, how: str) -> None:
    server.reply = Writer(how, "\n\n First.\n\n Then.")
    completion = drawn(remote, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("\n\n First.\n\n", "stop")


def test_where_a_silent_server_ends_its_text_at_a_stop_string_the_model_ended_it(server: Any, remote: Any) -> None:
    server.reply = Writer("silent", "All.\n\n")
    completion = drawn(remote, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("All.\n\n", "eos")


def test_a_piece_that_its_limit_ended_says_so(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": "So 3", "finish_reason": "length"}]
    completion = drawn(remote, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("So 3", "length")


def test_what_a_second_request_took_is_counted(server: Any, remote: Any) -> None:
    server.reply = Writer("silent")
    completion = drawn(remote, stop=("\n\n",))
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens) == (20, 6)


def test_several_samples_each_keep_their_stop(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [
        {"text": f"{i}", "finish_reason": "stop", "stop_reason": "ab"[i]} for i in range(body.get("n", 1))
    ]
    prompt = (Message(role="user", content="why"),)
    sampling = Sampling(keep_stop=True, stop=("a", "b"), temperature=1, n=2)
    assert [one.text for one in remote().generate([Request(prompt=prompt, sampling=sampling)])] == ["0a", "1b"]


# -- continuing ---------------------------------------------------------------------------------------------------


def test_continue_is_refused_in_one_line_before_anything_is_asked_of_a_server_that_starts_anew(
    server: Any, remote: Any, caplog: Any
) -> None:
    server.reply, server.continues = Writer("tells"), False
    decoder = remote()
    for _ in range(2):
        with pytest.raises(
            OptionError, match=r"does not continue an assistant message.*use generator=sample"
        ) as caught:
            grown(decoder)
        assert "\n" not in str(caught.value)
    assert (server.posts, caplog.text) == ([], "")
    assert len([asked for asked in server.asked if "messages" in asked.body]) == 1  # it is found out once


def test_another_prefix_is_answered_with_a_warning(server: Any, remote: Any, caplog: Any) -> None:
    server.reply, server.continues = lambda path, body: [{"text": "It is 42."}], False
    prompt = (Message(role="user", content="q"), Message(role="assistant", content="It is"))
    decoder = remote()
    assert [one.text for one in decoder.generate([Request(prompt=prompt)] * 2)] == [" 42."] * 2
    assert caplog.text.count("does not continue an assistant message") == 1


def test_a_server_that_continues_is_tried_once_and_not_where_nothing_is_continued(
    server: Any, remote: Any, caplog: Any
) -> None:
    decoder = remote()
    decoder.generate([Request(prompt=(Message(role="user", content="q"),))])
    assert len(server.asked) - len(server.posts) == 1  # the list of models
    prompt = (Message(role="user", content="q"), Message(role="assistant", content="So"))
    decoder.generate([Request(prompt=prompt)] * 5)
    decoder.generate([Request(prompt=prompt)])
    assert len(server.asked) - len(server.posts) == 2
    assert caplog.text == ""


def test_a_server_that_repeats_the_beginning_is_understood(server: Any, remote: Any) -> None:
    server.reply, server.repeats = Writer("repeats"), True
    assert path(grown(remote())) == PIECES


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_takes_no_assistant_message_at_the_end_is_refused_in_its_words(
    server: Any, remote: Any, status: int
) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "assistant":
            return status, {"error": {"message": "Conversation roles must alternate"}}
        return [{"text": "One.\n\nTwo."}]

    server.reply = reply
    with pytest.raises(OptionError, match=r"does not continue .* \(Conversation roles must alternate\)"):
        grown(remote())
