"""Missing, null and differently spelled fields of replies are read, and a reply without text is an error."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tot.decoders import Message, Request, RequestError, Sampling

QUESTION = (Message(role="user", content="q"),)


def ask(**sampling: Any) -> Request:
    return Request(prompt=QUESTION, sampling=Sampling(**sampling))


def reply(message: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a whole reply with one choice. `usage` is placed beside the choice."""
    usage = fields.pop("usage", {"prompt_tokens": 10, "completion_tokens": 3})
    choice = {"index": 0, "message": message or {"content": "7"}, "finish_reason": "stop", **fields}
    return {"choices": [choice], "usage": usage}


# -- counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (None, (0, 0)),
        ({}, (0, 0)),
        ([], (0, 0)),
        ({"prompt_tokens": None, "completion_tokens": None}, (0, 0)),
        ({"prompt_tokens": 10, "completion_tokens": None}, (10, 0)),
        ({"prompt_tokens": -1, "completion_tokens": -1}, (0, 0)),
        ({"prompt_tokens": 10.0, "completion_tokens": 5.0}, (10, 5)),
        ({"prompt_tokens": "10", "completion_tokens": "5"}, (10, 5)),
        ({"prompt_tokens": True, "completion_tokens": 1e400}, (0, 0)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": None}, (10, 5)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": None}}, (10, 5)),
        ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": -2}}, (10, 5)),
    ],
)
def test_invalid_counts_are_ignored(server: Any, remote: Any, usage: Any, counted: Any) -> None:
    server.reply = lambda path, body: reply(usage=usage)
    (completion,) = remote().generate([ask()])
    assert completion.text == "7"
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens) == counted
    assert completion.usage.reused_prompt_tokens == 0


@pytest.mark.parametrize("index", [None, "first", -1, [0]])
def test_without_an_index_samples_keep_their_order(server: Any, remote: Any, index: Any) -> None:
    whole = {"choices": [{"index": index, "message": {"content": text}} for text in "cab"]}
    server.reply = lambda path, body: whole
    assert [one.text for one in remote().generate([ask(temperature=1, n=3)])] == ["c", "a", "b"]


# -- contents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text", "thinking"),
    [
        ({"content": [{"type": "text", "text": "7"}]}, "7", ""),
        ({"content": [{"type": "text", "text": "7"}, {"type": "text", "text": "."}]}, "7.", ""),
        ({"content": [{"type": "output_text", "text": "7"}, "!"]}, "7!", ""),
        ({"content": [{"type": "thinking", "thinking": "3+4"}, {"type": "text", "text": "7"}]}, "7", "3+4"),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "3+4"}]},
                    {"type": "text", "text": "7"},
                ]
            },
            "7",
            "3+4",
        ),
        ({"content": []}, "", ""),
        ({"content": "7", "reasoning": {"effort": None}}, "7", ""),
        ({"content": None, "refusal": "I can't help with that."}, "I can't help with that.", ""),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No.", ""),
        ({"content": None}, "", ""),
    ],
)
def test_contents_of_several_parts_are_read(server: Any, remote: Any, message: Any, text: str, thinking: str) -> None:
    server.reply = lambda path, body: reply(message)
    (completion,) = remote().generate([ask()])
    assert completion.text == text
    assert "".join(part.text for part in completion.parts if part.kind == "thinking") == thinking


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb"7 \ud83d", "7 �"),
        (rb"7 \ude00\ud83d", "7 ��"),
        (rb"7 \ud83d\ude00", "7 😀"),
        (b"7 \xf0\x9f", "7 �"),
    ],
)
def test_half_a_character_is_replaced_without_a_retry(
    server: Any, remote: Any, fault: Any, raw: bytes, text: str
) -> None:
    server.always = fault(raw=json.dumps(reply({"content": "X"})).encode().replace(b"X", raw))
    (completion,) = remote().generate([ask()])
    assert completion.text == text
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("before", "encoding", "kind"),
    [
        (b"\n   ", "utf-8", "application/json"),
        ("\ufeff".encode(), "utf-8", "text/plain"),
        (b"", "latin-1", "text/plain"),
    ],
)
def test_json_is_read_with_any_surroundings(
    server: Any, remote: Any, fault: Any, before: bytes, encoding: str, kind: str
) -> None:
    raw = json.dumps(reply({"content": "Café 7"}), ensure_ascii=False).encode(encoding)
    server.always = fault(raw=before + raw, headers={"content-type": f"{kind}; charset={encoding}"})
    (completion,) = remote().generate([ask()])
    assert completion.text == "Café 7"


# -- finish reasons -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        *((name, "length") for name in ("length", "LENGTH", "max_tokens", "MAX_TOKENS", "max_output_tokens")),
        *((name, "length") for name in ("model_length", "token_limit", "max_new_tokens", "incomplete")),
        *((name, "stop") for name in ("stop_sequence", "stop_string")),
        *((name, "eos") for name in ("eos_token", "end_turn", "COMPLETE", "eos")),
        *((name, "eos") for name in ("stop", "STOP", None, 3, "whatever")),
    ],
)
def test_finish_reasons_of_other_servers_are_known(server: Any, remote: Any, finish: Any, reason: str) -> None:
    server.reply = lambda path, body: reply(finish_reason=finish)
    (completion,) = remote().generate([ask()])
    assert completion.finish_reason == reason


@pytest.mark.parametrize(
    ("fields", "reason"), [({"matched_stop": "x"}, "stop"), ({"matched_stop": 2}, "eos"), ({"stop_reason": 2}, "eos")]
)
def test_a_reported_stop_string_is_distinguished_from_the_models_end(
    server: Any, remote: Any, fields: dict[str, Any], reason: str
) -> None:
    server.reply = lambda path, body: reply(**fields)
    (completion,) = remote().generate([ask(stop=("x",))])
    assert completion.finish_reason == reason


@pytest.mark.parametrize("finish", ["content_filter", "SAFETY", "refusal", "RECITATION"])
@pytest.mark.parametrize("text", ["", "The ans"])
def test_a_filtered_reply_is_an_error(server: Any, remote: Any, finish: str, text: str) -> None:
    server.reply = lambda path, body: reply({"content": text}, finish_reason=finish)
    with pytest.raises(RequestError, match=rf"returned no text: its content filter cut the reply \({finish.lower()}\)"):
        remote().generate([ask()])
    assert len(server.posts) == 1


def test_one_filtered_sample_of_several_counts_as_cut(server: Any, remote: Any, caplog: Any) -> None:
    choices = [
        {"message": {"content": "7"}, "finish_reason": "stop"},
        {"message": {"content": ""}, "finish_reason": "content_filter"},
    ]
    server.reply = lambda path, body: {"choices": choices}
    done = remote().generate([ask(temperature=1, n=2)])
    assert [(one.text, one.finish_reason) for one in done] == [("7", "eos"), ("", "length")]
    assert 'one of 2 samples gets the finish reason "length": its content filter' in caplog.text


@pytest.mark.parametrize("finish", ["tool_calls", "function_call"])
def test_a_tool_call_is_an_error_and_not_an_empty_answer(server: Any, remote: Any, finish: str) -> None:
    server.reply = lambda path, body: reply({"content": None, "tool_calls": [{}]}, finish_reason=finish)
    with pytest.raises(RequestError, match="the reply is a tool call without a text"):
        remote().generate([ask()])


# -- log-probabilities --------------------------------------------------------------------------------------------


def logprobs(**tokens: float | None) -> dict[str, Any]:
    return {"content": [{"token": token, "logprob": value} for token, value in tokens.items()]}


def test_tokens_after_a_stop_string_have_no_log_probabilities(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: reply(
        {"content": "a.b"}, logprobs={**logprobs(**{"a": -1.0, ".": -2.0, "b": -4.0})}
    )
    (completion,) = remote(logprobs=True).generate([ask(stop=(".",))])
    assert (completion.text, completion.logprobs) == ("a", (-1.0,))


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_missing_log_probability_is_an_error_only_if_requested(server: Any, remote: Any, value: Any) -> None:
    server.reply = lambda path, body: reply({"content": "ab"}, logprobs=logprobs(a=value, b=-0.5))
    assert remote().generate([ask()])[0].text == "ab"
    with pytest.raises(RequestError, match="returned no log-probabilities"):
        remote(logprobs=True).generate([ask()])
