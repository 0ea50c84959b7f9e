"""Texts in pieces through servers: stop strings that stay in the text, and assistant messages that the server
continues.

`Writer` writes one message, and reports its stop like one kind of server.
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
    """A task with one message, in pieces."""

    thought = ("step",)
    depth = 9
    templates: ClassVar = {
        "step": "{% block user %}{{ question }}{% endblock %}"
        "{% block assistant %}{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}",
        "answer": "{{ question }}",
    }


class Writer:
    """Continue the assistant's text up to the first stop string. `how` selects how the server reports the stop."""

    def __init__(self, how: str, whole: str = WHOLE) -> None:
        self.how = how
        self.whole = whole

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if self.how == "strict" and "include_stop_str_in_output" in body:
            return 400, {"error": {"message": "Unrecognized request argument: include_stop_str_in_output"}}
        if self.how == "gruff" and "include_stop_str_in_output" in body:
            return 422, {"detail": "extra_forbidden"}
        last = body["messages"][-1]
        prefix = last["content"] if last["role"] == "assistant" else ""
        assert self.whole.startswith(prefix) or prefix.endswith(", 1"), prefix
        rest = self.whole[len(prefix) :]
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
            text = prefix + text
        return [{"text": text, **fields}] * body.get("n", 1)


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


# -- stop strings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["vllm", "tells", "sglang", "tgi", "silent", "strict", "gruff"])
def test_a_message_is_split_into_its_pieces_for_every_way_to_report_stops(server: Any, remote: Any, how: str) -> None:
    server.reply = Writer(how)
    solution = solved(remote())
    assert "".join(path(solution)) == WHOLE
    assert [piece.split() for piece in path(solution)] == [piece.split() for piece in PIECES]
    assert [node.thought.ended for node in solution.tree if node.thought] == [False, False, True]
    assert solution.parse_failures == 0
    assert solution.answer == WHOLE


@pytest.mark.parametrize(("how", "requests"), [("vllm", 3), ("tells", 3), ("silent", 4)])
def test_at_most_one_request_more_than_pieces_is_needed(server: Any, remote: Any, how: str, requests: int) -> None:
    server.reply = Writer(how, "One.\n\nTwo.\n\nThree.") if how == "vllm" else Writer(how)
    solved(remote())
    assert len(server.posts) == requests


def test_a_silent_server_is_asked_for_whole_texts_after_one_warning(server: Any, remote: Any, caplog: Any) -> None:
    server.reply = Writer("silent")
    decoder = remote()
    solved(decoder)
    solved(decoder)
    assert ["stop" in post.body for post in server.posts] == [True] + [False] * 6
    assert caplog.text.count("does not report which stop string ended a text") == 1
    first = server.posts[0].body, server.posts[1].body
    assert first[1] == {name: first[0][name] for name in first[0] if name not in ("stop", "include_stop_str_in_output")}


@pytest.mark.parametrize("how", ["vllm", "tells", "sglang", "silent", "tgi"])
def test_sentences_keep_their_end_mark_and_leave_the_space_to_the_next_word(server: Any, remote: Any, how: str) -> None:
    server.reply = Writer(how, "Is it 7? It is! Yes. It is 7.")
    solution = solved(remote(), "sentence")
    assert path(solution) == ["Is it 7?", " It is!", " Yes.", " It is 7."]


def test_a_custom_stop_string_is_kept_too(server: Any, remote: Any) -> None:
    server.reply = Writer("tells", "a; b; c")
    assert path(solved(remote(), "; ")) == ["a;", " b;", " c"]


def completion_of(remote: Callable[..., Any], **sampling: Any) -> Any:
    prompt = (Message(role="user", content="why"),)
    (completion,) = remote().generate([Request(prompt=prompt, sampling=Sampling(keep_stop=True, **sampling))])
    return completion


@pytest.mark.parametrize("how", ["vllm", "tells", "sglang", "silent", "tgi"])
def test_a_stop_string_after_leading_whitespace_does_not_end_a_text(server: Any, remote: Any, how: str) -> None:
    server.reply = Writer(how, "\n\n First.\n\n Then.")
    completion = completion_of(remote, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("\n\n First.\n\n", "stop")


def test_a_silent_servers_text_that_ends_in_a_stop_string_ended_by_itself(server: Any, remote: Any) -> None:
    server.reply = Writer("silent", "All.\n\n")
    completion = completion_of(remote, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("All.\n\n", "eos")


def test_a_piece_that_reaches_its_limit_reports_length(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": "So 3", "finish_reason": "length"}]
    completion = completion_of(remote, stop=("\n\n",))
    assert (completion.text, completion.finish_reason) == ("So 3", "length")


def test_usage_includes_a_second_request(server: Any, remote: Any) -> None:
    server.reply = Writer("silent")
    completion = completion_of(remote, stop=("\n\n",))
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens) == (20, 6)


def test_several_samples_each_keep_their_stop(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [
        {"text": f"{i}", "finish_reason": "stop", "stop_reason": "ab"[i]} for i in range(body.get("n", 1))
    ]
    prompt = (Message(role="user", content="why"),)
    sampling = Sampling(keep_stop=True, stop=("a", "b"), temperature=1, n=2)
    assert [one.text for one in remote().generate([Request(prompt=prompt, sampling=sampling)])] == ["0a", "1b"]


# -- continuing ---------------------------------------------------------------------------------------------------


def test_continue_is_refused_before_any_request_if_the_server_starts_a_new_reply(
    server: Any, remote: Any, caplog: Any
) -> None:
    server.reply, server.continues = Writer("tells"), False
    decoder = remote()
    for _ in range(2):
        with pytest.raises(
            OptionError, match=r"does not continue an assistant message.*use generator=sample"
        ) as caught:
            solved(decoder)
        assert "\n" not in str(caught.value)
    assert (server.posts, caplog.text) == ([], "")
    assert len([asked for asked in server.asked if "messages" in asked.body]) == 1  # the probe is sent once


def test_a_prefix_that_the_server_does_not_continue_causes_a_warning(server: Any, remote: Any, caplog: Any) -> None:
    server.reply, server.continues = lambda path, body: [{"text": "It is 42."}], False
    prompt = (Message(role="user", content="q"), Message(role="assistant", content="It is"))
    decoder = remote()
    assert [one.text for one in decoder.generate([Request(prompt=prompt)] * 2)] == [" 42."] * 2
    assert caplog.text.count("does not continue an assistant message") == 1


def test_a_continuing_server_is_probed_once_and_only_if_needed(server: Any, remote: Any, caplog: Any) -> None:
    decoder = remote()
    decoder.generate([Request(prompt=(Message(role="user", content="q"),))])
    assert len(server.asked) - len(server.posts) == 1  # the list of models
    prompt = (Message(role="user", content="q"), Message(role="assistant", content="So"))
    decoder.generate([Request(prompt=prompt)] * 5)
    decoder.generate([Request(prompt=prompt)])
    assert len(server.asked) - len(server.posts) == 2
    assert caplog.text == ""


def test_a_server_that_repeats_the_prefix_is_understood(server: Any, remote: Any) -> None:
    server.reply, server.repeats = Writer("repeats"), True
    assert path(solved(remote())) == PIECES


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_refuses_a_final_assistant_message_is_quoted_in_the_error(
    server: Any, remote: Any, status: int
) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "assistant":
            return status, {"error": {"message": "Conversation roles must alternate"}}
        return [{"text": "One.\n\nTwo."}]

    server.reply = reply
    with pytest.raises(OptionError, match=r"does not continue .* \(Conversation roles must alternate\)"):
        solved(remote())
