"""The thinking of a model is separated from its text, in every format that servers send."""

from __future__ import annotations

from typing import Any

import pytest

from tot.decoders import Message, Request, Sampling

QUESTION = (Message(role="user", content="q"),)


def thought(completion: Any) -> tuple[str, str]:
    return "".join(part.text for part in completion.parts if part.kind == "thinking"), completion.text


@pytest.mark.parametrize(
    ("choice", "thinking", "text"),
    [
        ({"text": "7", "message": {"reasoning_content": "3 + 4"}}, "3 + 4", "7"),
        ({"text": "7", "message": {"reasoning": "3 + 4"}}, "3 + 4", "7"),
        ({"text": "<think>3 + 4</think>\n\n7"}, "3 + 4", "7"),
        ({"text": "\n<think>\n3 + 4\n</think>7"}, "\n3 + 4\n", "7"),
        ({"text": "3 + 4</think>7"}, "3 + 4", "7"),
        ({"text": "<think>3 + 4", "finish_reason": "length"}, "3 + 4", ""),
        ({"text": None, "message": {"reasoning_content": "3 +"}, "finish_reason": "length"}, "3 +", ""),
        ({"text": "I <think> so"}, "", "I <think> so"),
        ({"text": "7"}, "", "7"),
    ],
)
def test_thinking_is_not_part_of_the_text(
    server: Any, remote: Any, choice: dict[str, Any], thinking: str, text: str
) -> None:
    server.reply = lambda path, body: [choice]
    (completion,) = remote().generate([Request(prompt=QUESTION)])
    assert thought(completion) == (thinking, text)
    assert completion.answer == text
    assert [part.kind for part in completion.parts] == (["thinking"] if thinking else []) + ["exact"]


def test_thinking_has_its_own_token_limit_and_ignores_stop_strings(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": "<think>a\n\nb</think>7\n\n8", "finish_reason": "stop"}]
    request = Request(prompt=QUESTION, sampling=Sampling(max_tokens=16, stop=("\n\n",)))
    (completion,) = remote(thinking_tokens=1000).generate([request])
    assert (server.posts[0].body["max_tokens"], "stop" in server.posts[0].body) == (1016, False)
    assert (thought(completion), completion.finish_reason) == (("a\n\nb", "7"), "stop")


def test_a_rationale_is_continued_without_its_thinking(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        answers = body["messages"][-1]["role"] == "assistant"
        return [{"text": " 7" if answers else "<think>hm</think>It is easy."}]

    server.reply = reply
    (completion,) = remote().generate([Request(prompt=QUESTION, answer_trigger=" So:")])
    assert server.posts[1].body["messages"][-1]["content"] == "It is easy. So:"
    assert (completion.text, completion.answer, thought(completion)[0]) == ("It is easy. So: 7", " 7", "hm")
    assert [part.kind for part in completion.parts] == ["thinking", "exact", "trigger", "exact"]


def test_choices_are_found_after_the_thinking(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": "<think>10? no</think>7"}]
    (completion,) = remote(thinking_tokens=50).generate([Request(prompt=QUESTION, choices=("10", "7"))])
    assert [one.total for one in completion.choice_logprobs] == [-100.0, 0.0]
