"""Choices scored in each way, against hand-computed values, with fallbacks to the next way.

The servers here are toys: a token is a character or a pair of digits, and its log-probability is minus its id divided
by its position. So every score is a short sum.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tot.decoders import Message, ModelError, Request, RequestError, Sampling
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
        return [{"text": "10 it is"}]

    def tokenized(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            return ([START] if body.get("add_special_tokens", True) else []) + encode(body["prompt"])
        ids = [START]
        for message in body["messages"]:
            ids += [*encode(message["content"]), END]
        return ids[:-1] if body["continue_final_message"] else ids

    def echoed(self, body: dict[str, Any]) -> Any:
        if "echo" not in self.can:
            return [{"text": " and so on", "logprobs": None}]
        ids = [*body["prompt"], ord("!")]
        logprobs = [None, *(logprob(token, place) for place, token in enumerate(ids) if place)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
        return {"choices": [{"text": "", "logprobs": {"token_logprobs": logprobs}}], "usage": usage}

    def next(self, body: dict[str, Any]) -> Any:
        place = len(body["prompt"])
        wanted = body["logprob_token_ids"] if "next" in self.can else [63]
        assert body["return_tokens_as_token_ids"]
        top = {f"token_id:{token}": logprob(token, place) for token in wanted}
        return [{"text": "?", "logprobs": {"tokens": ["token_id:63"], "top_logprobs": [top]}}]


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
@pytest.mark.parametrize(("kind", "can"), [("vllm", "next"), ("vllm", "echo"), ("sglang", "echo")])
@pytest.mark.parametrize("closed", [True, False])
def test_the_servers_own_tokens_give_exact_scores(
    server: Any, remote: Any, caplog: Any, prompt: Any, kind: str, can: str, closed: bool
) -> None:
    server.reply = Toy("tokenize", can)
    choices = ("1", "10", " 2", "105")
    request = Request(prompt=prompt, choices=choices, close_choices=closed)
    (completion,) = remote(server=kind).generate([request])
    end = [END] if closed else []
    expected = [scored(HEADS[prompt], [*encode(choice), *end]) for choice in choices]
    assert totals(completion) == pytest.approx(expected, rel=1e-12)
    assert [one.tokens for one in completion.choice_logprobs] == [len(encode(one) + end) for one in choices]
    assert (completion.text, completion.finish_reason, caplog.text) == ("", "stop", "")


@pytest.mark.parametrize("prompt", [CHAT, OPEN, "text"], ids=["messages", "prefix", "text"])
def test_a_server_that_scores_choices_itself_is_used(server: Any, remote: Any, prompt: Any, caplog: Any) -> None:
    server.reply = Toy("choices")
    request = Request(prompt=prompt, choices=("a", "bcd"), close_choices=True)
    (completion,) = remote(server="tot").generate([request])
    assert [(one.total, one.tokens) for one in completion.choice_logprobs] == [(-1.0, 1), (-3.0, 3)]
    (post,) = server.posts
    assert (post.body["choices"], post.body["close_choices"]) == (["a", "bcd"], True)
    assert caplog.text == ""


def test_a_server_that_fails_for_given_token_ids_is_scored_by_echo(server: Any, remote: Any) -> None:
    class Speculating(Toy):
        """A server that fails like vLLM with speculative decoding."""

        def __call__(self, path: str, body: dict[str, Any]) -> Any:
            failing = "logprob_token_ids" in body
            return (500, {"error": {"message": "list index out of range"}}) if failing else super().__call__(path, body)

    server.reply = Speculating("tokenize", "echo", "next")
    decoder = remote(server="vllm")
    for _ in range(2):
        (completion,) = decoder.generate([Request(prompt="text", choices=("1", "10"))])
        assert totals(completion) == pytest.approx([scored(HEADS["text"], encode(choice)) for choice in ("1", "10")])
    assert sum("logprob_token_ids" in post.body for post in server.posts) == 1  # not retried for each request


def test_a_prompt_that_every_way_refuses_does_not_change_the_way(server: Any, remote: Any) -> None:
    toy = Toy("tokenize", "next")

    def reply(path: str, body: dict[str, Any]) -> Any:
        long = len(str(body.get("prompt", ""))) + len(str(body.get("messages", ""))) > 1000
        refused = long and not path.endswith("/tokenize")
        return (400, {"error": {"message": "maximum context length is 100 tokens"}}) if refused else toy(path, body)

    server.reply = reply
    decoder = remote(server="vllm")
    with pytest.raises(RequestError, match="maximum context length is 100 tokens"):
        decoder.generate([Request(prompt="x" * 1001, choices=("1", "2"))])
    (completion,) = decoder.generate([Request(prompt="text", choices=("1", "2"))])
    assert totals(completion) == pytest.approx([scored(HEADS["text"], encode(one)) for one in ("1", "2")])


def test_shared_prefixes_of_choices_are_requested_once(server: Any, remote: Any) -> None:
    server.reply = Toy("tokenize", "next")
    remote(server="vllm").generate([Request(prompt=CHAT, choices=("aa", "ab", "ac", "b"))])
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
    decoder = remote(server="vllm")
    requests = [Request(prompt=text, choices=("1", "2"), close_choices=True) for text in "abc"]
    for sent in [requests] if together else [[request] for request in requests]:
        decoder.generate(sent)
    bodies = [post for post in server.posts if post.path == "/tokenize"]
    assert len(bodies) == 2 * 2 + 2 + 3  # each choice with its line break, the end of a turn, and the prompts


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_a_server_without_logprobs_is_scored_by_its_text(server: Any, remote: Any, caplog: Any, kind: str) -> None:
    server.reply = Toy()
    (completion,) = remote(server=kind).generate([Request(prompt=CHAT, choices=("1", " 10", "2"))])
    assert totals(completion) == [-100.0, 0.0, -100.0]
    assert "from the generated text" in caplog.text


def test_an_outage_does_not_change_the_way_of_scoring(server: Any, remote: Any, fault: Any) -> None:
    server.reply = Toy("tokenize", "echo", "next")
    server.faults += [fault(503), fault(reset=True), fault(keep=0.5), fault(500)] * 2
    exact = [scored(HEADS[CHAT], [*encode(one), END]) for one in ("1", "10")]
    request = Request(prompt=CHAT, choices=("1", "10"), close_choices=True)
    (completion,) = remote(server="vllm", retries=20).generate([request])
    assert totals(completion) == pytest.approx(exact)
    assert not any("echo" in post.body for post in server.posts)
    server.always = fault(503)
    with pytest.raises(ModelError, match="does not answer"):
        remote(server="vllm", retries=1).generate([Request(prompt=CHAT, choices=("1", "10"))])


def test_choices_after_a_rationale_are_scored_after_the_trigger(server: Any, remote: Any) -> None:
    server.reply = Toy("tokenize", "next")
    request = Request(prompt=CHAT, sampling=Sampling(), answer_trigger=" So", choices=("1", "2"))
    (completion,) = remote(server="vllm").generate([request])
    head = [*HEADS[CHAT], *encode("10 it is So")]
    assert totals(completion) == pytest.approx([scored(head, encode(one)) for one in ("1", "2")])
    assert (completion.text, completion.answer) == ("10 it is So", "")


@pytest.mark.parametrize(
    ("text", "chosen"), [("10.", "10"), ("1, not 10", "1"), (" I say 10 or 1", "10"), ("Sure!", "sure"), ("no", None)]
)
def test_a_text_selects_the_choice_at_its_start_or_named_first(text: str, chosen: str | None) -> None:
    choices = ("1", " 10", "sure")
    best = [one.strip() for one, score in zip(choices, by_text(choices, text), strict=True) if score.total == 0.0]
    assert best == ([chosen] if chosen else [])
