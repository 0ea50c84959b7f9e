"""Choices scored in each of the four ways, against hand-computed values, with fallbacks to the next way.

The servers here are toys: a token is a character or a pair of digits, and its log-probability is minus its id divided
by its position. So every score is a short sum.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tot.decoders import Budget, Completion, Message, Meter, ModelError, Request, RequestError, Sampling
from tot.decoders.remote.choices import by_text

START, END = 1, 2


def tokens_of(text: str) -> list[str]:
    """Split a text into pairs of digits and single characters."""
    return re.findall(r"\d\d|.", text, re.DOTALL)


def id_of(token: str) -> int:
    return 1000 + int(token) if len(token) == 2 else ord(token)


def encode(text: str) -> list[int]:
    return [id_of(token) for token in tokens_of(text)]


def logprob(token: int, place: int) -> float:
    return -token / place


def scored(head: list[int], choice: list[int]) -> float:
    return sum(logprob(token, len(head) + i) for i, token in enumerate(choice))


class Toy:
    """A toy server with the template <s>user|assistant, where a turn ends with </s>. `can` lists its features."""

    def __init__(self, *can: str) -> None:
        self.can = can
        self.least = 0

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path.endswith("/tokenize"):
            return {"tokens": self.tokenized(body)} if "tokenize" in self.can else (404, {"detail": "Not Found"})
        if body.get("echo"):
            return self.echoed(body)
        if "logprob_token_ids" in body:
            return self.next(body)
        if "choices" in body and "choices" in self.can:
            scores = [{"total": -float(len(one)), "tokens": len(one)} for one in body["choices"]]
            return [{"text": "", "choice_logprobs": scores}]
        return self.drawn(path, body)

    def tokenized(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            return ([START] if body.get("add_special_tokens", True) else []) + encode(body["prompt"])
        ids = [START]
        for message in body["messages"]:
            ids += [*encode(message["content"]), END]
        return ids[:-1] if body["continue_final_message"] else ids

    def echoed(self, body: dict[str, Any]) -> Any:
        if "echo" not in self.can:
            if body["max_tokens"] == 0:
                return 500, "max_tokens=0 was too much for it"
            return [{"text": " and so on", "logprobs": None}]
        if body["max_tokens"] < self.least:
            return 400, {"error": {"message": "max_tokens must be at least 1"}}
        ids = [*body["prompt"], *[ord("!")] * body["max_tokens"]]
        logprobs = [None, *(logprob(token, place) for place, token in enumerate(ids) if place)]
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": 1,
        }  # vLLM counts one new token too many
        return {"choices": [{"text": "", "logprobs": {"token_logprobs": logprobs}}], "usage": usage}

    def next(self, body: dict[str, Any]) -> Any:
        place = len(body["prompt"])
        wanted = body["logprob_token_ids"] if "next" in self.can else [63]
        assert body["return_tokens_as_token_ids"]
        top = {f"token_id:{token}": logprob(token, place) for token in wanted}
        return [{"text": "?", "logprobs": {"tokens": ["token_id:63"], "top_logprobs": [top]}}]

    def drawn(self, path: str, body: dict[str, Any]) -> Any:
        return [{"text": "10 it is"}]


CHAT = (Message(role="user", content="hi"),)
OPEN = (*CHAT, Message(role="assistant", content="so"))
HEADS = {
    CHAT: [START, *encode("hi"), END],
    OPEN: [START, *encode("hi"), END, *encode("so")],
    "text": [START, *encode("text")],
}


def totals(completion: Any) -> list[float]:
    return [one.total for one in completion.choice_logprobs]


@pytest.mark.parametrize("prompt", [CHAT, OPEN, "text"], ids=["messages", "prefix", "text"])
@pytest.mark.parametrize("can", [("tokenize", "echo", "next"), ("tokenize", "echo")], ids=["next", "echo"])
@pytest.mark.parametrize("closed", [True, False])
def test_the_servers_own_tokens_give_exact_scores(
    server: Any, remote: Any, prompt: Any, can: tuple[str, ...], closed: bool
) -> None:
    server.reply = Toy(*can)
    choices = ("1", "10", " 2", "105")
    request = Request(prompt=prompt, choices=choices, close_choices=closed)
    (completion,) = remote().generate([request])
    end = [END] if closed else []
    expected = [scored(HEADS[prompt], [*encode(choice), *end]) for choice in choices]
    assert totals(completion) == pytest.approx(expected, rel=1e-12)
    assert [one.tokens for one in completion.choice_logprobs] == [len(encode(one) + end) for one in choices]
    assert (completion.text, completion.finish_reason) == ("", "stop")


@pytest.mark.parametrize("prompt", [CHAT, OPEN, "text"], ids=["messages", "prefix", "text"])
def test_a_server_that_scores_choices_itself_is_used(server: Any, remote: Any, prompt: Any, caplog: Any) -> None:
    server.reply = Toy("choices")
    (completion,) = remote().generate([Request(prompt=prompt, choices=("a", "bcd"), close_choices=True)])
    assert [(one.total, one.tokens) for one in completion.choice_logprobs] == [(-1.0, 1), (-3.0, 3)]
    assert (server.posts[-1].body["choices"], server.posts[-1].body["close_choices"]) == (["a", "bcd"], True)
    assert caplog.text == ""


def test_a_server_that_fails_for_given_token_ids_is_scored_by_echo(server: Any, remote: Any) -> None:
    class Speculating(Toy):
        """A server that fails like vLLM with speculative decoding."""

        def __call__(self, path: str, body: dict[str, Any]) -> Any:
            failing = "logprob_token_ids" in body
            return (500, {"error": {"message": "list index out of range"}}) if failing else super().__call__(path, body)

    server.reply = Speculating("tokenize", "echo", "next")
    (completion,) = remote().generate([Request(prompt="text", choices=("1", "10"))])
    assert totals(completion) == pytest.approx([scored(HEADS["text"], encode(choice)) for choice in ("1", "10")])
    assert sum("logprob_token_ids" in post.body for post in server.posts) == 1  # not retried for each request


def test_prompts_of_token_ids_are_scored_unchanged(server: Any, remote: Any) -> None:
    server.reply = Toy("tokenize", "echo", "next")
    (completion,) = remote().generate([Request(prompt=(5, 6, 7), choices=("1", "2"))])
    assert totals(completion) == pytest.approx([-ord("1") / 3, -ord("2") / 3])


def test_shared_prefixes_of_choices_are_requested_once(server: Any, remote: Any) -> None:
    server.reply = Toy("tokenize", "next")
    remote().generate([Request(prompt=CHAT, choices=("aa", "ab", "ac", "b"))])
    bodies = [post.body for post in server.posts if "logprob_token_ids" in post.body]
    head = HEADS[CHAT]
    assert {tuple(body["prompt"]): body["logprob_token_ids"] for body in bodies} == {
        tuple(head): encode("ab"),
        (*head, ord("a")): encode("abc"),
    }
    assert len(bodies) == 2


@pytest.mark.parametrize("together", [False, True])
def test_choices_are_tokenized_once_for_all_prompts(server: Any, remote: Any, together: bool) -> None:
    server.reply = Toy("tokenize", "next")
    decoder = remote()
    requests = [Request(prompt=text, choices=("1", "2"), close_choices=True) for text in "abc"]
    for sent in [requests] if together else [[request] for request in requests]:
        decoder.generate(sent)
    bodies = [post for post in server.posts if post.path == "/tokenize"]
    assert len(bodies) == 2 * 2 + 2 + 3  # each choice with its line break, the end of a turn, and the prompts


def test_a_server_that_must_sample_a_token_is_scored_without_it(server: Any, remote: Any) -> None:
    server.reply = toy = Toy("tokenize", "echo")
    toy.least = 1
    (completion,) = remote().generate([Request(prompt="text", choices=("1", "xyz"))])
    assert totals(completion) == pytest.approx([scored(HEADS["text"], encode(one)) for one in ("1", "xyz")])


def test_a_server_without_logprobs_is_scored_by_its_text(server: Any, remote: Any, caplog: Any) -> None:
    server.reply = Toy()
    (completion,) = remote().generate([Request(prompt=CHAT, choices=("1", " 10", "2"))])
    assert totals(completion) == [-100.0, 0.0, -100.0]
    assert "from the generated text" in caplog.text


def test_a_filtered_reply_chooses_nothing(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": "", "finish_reason": "content_filter"}]
    with pytest.raises(RequestError, match="its content filter cut the reply"):
        remote().generate([Request(prompt=CHAT, choices=("1", "2"))])


def test_an_outage_does_not_change_the_scoring_method(server: Any, remote: Any, fault: Any) -> None:
    server.reply = Toy("tokenize", "echo", "next")
    server.faults += [fault(503), fault(reset=True), fault(keep=0.5), fault(500)] * 2
    decoder = remote(retries=20)
    exact = [scored(HEADS[CHAT], [*encode(one), END]) for one in ("1", "10")]
    (completion,) = decoder.generate([Request(prompt=CHAT, choices=("1", "10"), close_choices=True)])
    assert totals(completion) == pytest.approx(exact)
    server.always = fault(503)
    with pytest.raises(ModelError, match="does not answer"):
        remote(retries=1).generate([Request(prompt=CHAT, choices=("1", "10"))])


def test_choices_after_a_rationale_are_scored_after_the_trigger(server: Any, remote: Any) -> None:
    server.reply = Toy("tokenize", "next")
    (completion,) = remote().generate(
        [Request(prompt=CHAT, sampling=Sampling(), answer_trigger=" So", choices=("1", "2"))]
    )
    head = [*HEADS[CHAT], *encode("10 it is So")]
    assert totals(completion) == pytest.approx([scored(head, encode(one)) for one in ("1", "2")])
    assert (completion.text, completion.answer) == ("10 it is So", "")


def test_a_spent_budget_leaves_no_scores(server: Any, remote: Any) -> None:

    server.reply = Toy("tokenize", "next")
    request = Request(prompt=CHAT, choices=("1", "2"))

    async def complete() -> list[Completion]:
        (pending,) = remote().start([request], Meter(Budget(tokens=0)))
        return list(await pending)

    (completion,) = asyncio.run(complete())
    assert (completion.choice_logprobs, completion.finish_reason) == ((), "budget")


def test_usage_of_choices_is_the_servers_count(server: Any, remote: Any) -> None:
    server.reply = Toy("tokenize", "echo")
    decoder = remote(input_price=1e6)
    decoder.generate([Request(prompt="first", choices=("1",))])  # the other method is tried once, and paid for
    (completion,) = decoder.generate([Request(prompt="text", choices=("1", "xyz"))])
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens, completion.usage.cost) == (6 + 8, 0, 14.0)


# -- scoring by text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen"), [("10.", "10"), ("1, not 10", "1"), (" I say 10 or 1", "10"), ("Sure!", "sure"), ("no", None)]
)
def test_by_text_selects_the_choice_at_the_start_or_named_first(text: str, chosen: str | None) -> None:
    choices = ("1", " 10", "sure")
    best = [one.strip() for one, score in zip(choices, by_text(choices, text), strict=True) if score.total == 0.0]
    assert best == ([chosen] if chosen else [])
