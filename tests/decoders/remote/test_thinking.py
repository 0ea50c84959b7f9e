"""Thinking of the models of servers: the fields that set it, the replies that contain it, and answers after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tot.decoders import Completion, Message, OptionError, Request, Sampling
from tot.decoders.budget import Budget, Meter

QUESTION = (Message(role="user", content="q"),)
OFF = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
ON = {"enable_thinking": True, "thinking": True}


def ask(choices: tuple[str, ...] = (), template: dict[str, Any] | None = None, **sampling: Any) -> Request:
    options = {"choices": choices, "template_options": template or {}}
    return Request(prompt=QUESTION, sampling=Sampling(**{"max_tokens": 50, **sampling}), **options)


# -- replies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "thinking", "text"),
    [
        ({"text": "7", "message": {"reasoning_content": "3 + 4"}}, "3 + 4", "7"),
        ({"text": "7", "message": {"reasoning": "3 + 4"}}, "3 + 4", "7"),
        ({"text": "<think>3 + 4</think>\n\n7"}, "3 + 4", "7"),
        ({"text": "\n<think>\n3 + 4\n</think>7"}, "\n3 + 4\n", "7"),
        ({"text": "3 + 4</think>7"}, "3 + 4", "7"),
        ({"text": "I <think> so"}, "", "I <think> so"),
        ({"text": "7"}, "", "7"),
    ],
)
def test_thinking_is_not_part_of_the_text(
    server: Any, remote: Any, choice: dict[str, Any], thinking: str, text: str
) -> None:
    server.reply = lambda path, body: [choice]
    (completion,) = remote().generate([ask()])
    assert (completion.thinking, completion.text, completion.answer) == (thinking, text, text)
    assert [part.kind for part in completion.parts] == (["thinking"] if thinking else []) + ["exact"]
    assert len(server.posts) == 1


def test_the_tokens_of_the_thinking_are_read(server: Any, remote: Any) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}
    message = {"content": "7", "reasoning_content": "3 + 4"}
    server.reply = lambda path, body: {"choices": [{"index": 0, "message": message}], "usage": usage}
    (completion,) = remote().generate([ask()])
    assert [(part.kind, part.tokens) for part in completion.parts] == [("thinking", 6), ("exact", 3)]


def test_a_rationale_is_continued_without_its_thinking(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        answers = body["messages"][-1]["role"] == "assistant"
        return [{"text": " 7" if answers else "<think>hm</think>It is easy."}]

    server.reply = reply
    (completion,) = remote().generate([Request(prompt=QUESTION, answer_trigger=" So:")])
    assert server.posts[1].body["messages"][-1]["content"] == "It is easy. So:"
    assert (completion.text, completion.answer, completion.thinking) == ("It is easy. So: 7", " 7", "hm")
    assert [part.kind for part in completion.parts] == ["thinking", "exact", "trigger", "exact"]


def test_the_thinking_of_earlier_turns_is_sent_back(server: Any, remote: Any) -> None:
    earlier = Message(role="assistant", content="7", reasoning_content="3 + 4")
    remote().generate([Request(prompt=(*QUESTION, earlier, *QUESTION))])
    sent = [{"role": "assistant", "content": "7", "reasoning_content": "3 + 4"}]
    assert server.posts[0].body["messages"][1:2] == sent
    assert set(server.posts[0].body["messages"][0]) == {"role", "content"}


# -- fields -------------------------------------------------------------------------------------------------------

BUDGETS = ("thinking_budget_tokens", "reasoning_budget_tokens")
SENT = [
    ("vllm", "off", {"reasoning_effort": "low", "chat_template_kwargs": OFF}),
    ("vllm", "low", {"reasoning_effort": "low", "chat_template_kwargs": {**ON, "thinking_budget": 1024}}),
    ("sglang", 3000, {"reasoning_effort": "medium", "chat_template_kwargs": {**ON, "thinking_budget": 3000}}),
    (
        "llama-server",
        "high",
        {
            "reasoning_effort": "high",
            "chat_template_kwargs": {**ON, "thinking_budget": 16384},
            **dict.fromkeys(BUDGETS, 16384),
        },
    ),
    ("llama-server", 0, {"reasoning_effort": "low", "chat_template_kwargs": OFF, **dict.fromkeys(BUDGETS, 0)}),
    ("ollama", "off", {"reasoning_effort": "none"}),
    ("ollama", "medium", {"reasoning_effort": "medium"}),
    ("openai", 200, {"reasoning_effort": "low"}),
    *((kind, "auto", {}) for kind in ("vllm", "sglang", "llama-server", "ollama", "openai")),
]


@pytest.mark.parametrize(("kind", "thinking", "fields"), SENT)
def test_each_server_gets_its_own_fields(
    server: Any, remote: Any, kind: str, thinking: Any, fields: dict[str, Any]
) -> None:
    remote(server=kind).generate([ask(thinking=thinking)])
    (asked,) = server.posts
    basic = {"model", "messages", "max_tokens", "temperature", "seed"}
    assert {name: value for name, value in asked.body.items() if name not in basic} == fields
    beside = {"off": 0, "low": 1024, "medium": 4096, "high": 16384, "auto": 0}
    assert asked.body["max_tokens"] == 50 + (thinking if isinstance(thinking, int) else beside[thinking])


def test_options_of_the_template_are_sent_and_override_switches(server: Any, remote: Any, caplog: Any) -> None:
    request = ask(thinking="off", template={"enable_thinking": True, "language": "de"})
    remote(server="vllm").generate([request])
    assert server.posts[0].body["chat_template_kwargs"] == {**OFF, "enable_thinking": True, "language": "de"}
    decoder = remote()
    decoder.generate([request, request])
    assert server.posts[1].body["chat_template_kwargs"] == {"enable_thinking": True, "language": "de"}
    assert caplog.text.count("may ignore template_options") == 1
    with pytest.raises(OptionError, match="Ollama ignores template_options: leave them out, or set thinking"):
        remote(server="ollama").generate([request])


@pytest.mark.parametrize(
    ("kind", "thinking", "name"),
    [
        ("vllm", {"settle": 0.9}, "settle"),
        ("llama-server", {"waits": 1}, "waits"),
        ("sglang", {"counted": True}, "counted"),
        ("ollama", {"hint": "So"}, "hint"),
        ("llama-server", {"hint": "So"}, "hint"),
    ],
)
def test_an_option_that_a_server_lacks_is_refused(
    server: Any, remote: Any, kind: str, thinking: dict[str, Any], name: str
) -> None:
    with pytest.raises(OptionError, match=f"has no {name} for thinking: leave it out, or use tot serve"):
        remote(server=kind).generate([ask(thinking=thinking)])
    assert server.posts == []


# -- answers after thinking ---------------------------------------------------------------------------------------


class Thinker:
    """A model that thinks five words of ten tokens each, and answers 7. A server may read its thinking `apart`."""

    def __init__(self, apart: bool = False, always: bool = False) -> None:
        self.apart = apart
        self.always = always
        """Whether it also thinks where it must not."""
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        self.bodies.append(body)
        last = body["messages"][-1]
        off = (
            body.get("reasoning_effort") == "none"
            or body.get("chat_template_kwargs", {}).get("enable_thinking") is False
        )
        if (off and not self.always) or (last["role"] == "assistant" and last["content"].rstrip().endswith("</think>")):
            return [{"text": "7", "stop_reason": None}]
        words = ["one", "two", "three.\n\nfour", "five", "six"][: body["max_tokens"] // 10]
        thinking, stopped = " ".join(words), False
        for stop in body.get("stop", ()):
            stopped = stopped or stop in thinking
            thinking = thinking.partition(stop)[0]
        cut = stopped or len(words) < 5 or body["max_tokens"] < 60
        fields = {"finish_reason": "stop" if stopped or not cut else "length"}
        n = body.get("n", 1)
        if self.apart:
            return [{"text": None if cut else "7", "message": {"reasoning_content": thinking}, **fields}] * n
        return [{"text": f"<think>\n{thinking}" + ("" if cut else "\n</think>\n\n7"), **fields}] * n


def kinds(completion: Completion) -> list[str]:
    return [part.kind for part in completion.parts]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_thinking_that_spends_its_budget_is_closed(server: Any, remote: Any, kind: str, apart: bool) -> None:
    server.reply = thinker = Thinker(apart)
    request = ask(thinking=20, max_tokens=20, temperature=1.0, n=2, seed=3, stop=(".",))
    first, second = remote(server=kind).generate([request])
    assert (first.text, first.finish_reason, kinds(first)) == ("7", "eos", ["thinking", "closing", "exact"])
    assert first.thinking.strip() == "one two three.\n\nfour five"
    assert second.text == "7"
    opened, *closed = thinker.bodies
    assert (opened["max_tokens"], opened["n"], "stop" in opened) == (40, 2, False)
    for body in closed:
        assert body["messages"][-1] == {
            "role": "assistant",
            "content": f"<think>\n{first.thinking.strip()}\n</think>\n\n",
        }
        assert (body["continue_final_message"], body["max_tokens"], body["stop"]) == (True, 20, ["."])
    assert len({body["seed"] for body in thinker.bodies}) == 3
    assert first.usage.new_tokens == 3 + 3


def test_a_hint_begins_an_answer_after_closed_thinking(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [
        {"text": " 7"}
        if body["messages"][-1]["role"] == "assistant"
        else {"text": "<think>\nHm", "finish_reason": "length"}
    ]
    (completion,) = remote(server="vllm").generate([ask(thinking={"budget": 20, "hint": "Answer:"})])
    assert server.posts[1].body["messages"][-1]["content"] == "<think>\nHm\n</think>\n\nAnswer:"
    assert (completion.text, kinds(completion)) == ("Answer: 7", ["thinking", "closing", "trigger", "exact"])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["llama-server", "ollama", "openai"])
def test_an_answer_is_requested_without_thinking_where_no_message_is_continued(
    server: Any, remote: Any, kind: str, apart: bool
) -> None:
    server.reply = thinker = Thinker(apart)
    (completion,) = remote(server=kind).generate([ask(thinking=20, max_tokens=20)])
    assert (completion.text, kinds(completion)) == ("7", ["thinking", "exact"])
    assert [body["max_tokens"] for body in thinker.bodies] == [40, 20]
    assert [message["role"] for message in thinker.bodies[1]["messages"]] == ["user"]


@pytest.mark.parametrize("limits", [{"max_tokens": 30}, {"max_tokens": 90, "stop": (".",)}])
def test_thinking_of_a_model_that_is_not_known_to_think_gets_tokens_when_it_is_cut(
    server: Any, remote: Any, limits: dict[str, Any]
) -> None:
    server.reply = thinker = Thinker()
    decoder = remote()
    for seed in (1, 2):
        (completion,) = decoder.generate([ask(seed=seed, **limits)])
        assert (completion.text, completion.thinking.strip()) == ("7", "one two three.\n\nfour five six")
    most = limits["max_tokens"]
    assert [body["max_tokens"] for body in thinker.bodies] == [most, most + 4096, most + 4096]
    assert ["stop" in body for body in thinker.bodies] == ["stop" in limits, False, False]


def test_a_text_that_thinks_whatever_is_asked_has_no_answer_and_no_thought_in_it(server: Any, remote: Any) -> None:
    server.reply = thinker = Thinker(always=True)
    (completion,) = remote().generate([ask(thinking=10, max_tokens=10)])
    assert (completion.text, completion.lacks_answer, len(thinker.bodies)) == ("", True, 2)
    assert completion.usage.new_tokens == 6


def test_a_refused_continuation_is_requested_without_thinking(server: Any, remote: Any) -> None:
    thinker = Thinker()

    def reply(path: str, body: dict[str, Any]) -> Any:
        if "continue_final_message" in body:
            return 400, {"error": {"message": "the final message does not appear in the chat"}}
        return thinker(path, body)

    server.reply = reply
    (completion,) = remote(server="vllm").generate([ask(thinking=20, max_tokens=20)])
    assert (completion.text, kinds(completion)) == ("7", ["thinking", "exact"])


def test_an_answer_that_the_server_reads_as_thinking_is_an_answer(server: Any, remote: Any) -> None:
    """vLLM's parser of R1 takes a text without a closing tag for thinking."""

    def reply(path: str, body: dict[str, Any]) -> Any:
        continues = body["messages"][-1]["role"] == "assistant"
        message = {"reasoning": "The answer is 7." if continues else "Hm"}
        return [{"text": None, "message": message, "finish_reason": "stop" if continues else "length"}]

    server.reply = reply
    (completion,) = remote(server="vllm").generate([ask(thinking=20)])
    assert (completion.text, completion.thinking, kinds(completion)) == (
        "The answer is 7.",
        "Hm",
        ["thinking", "closing", "exact"],
    )


def test_a_text_prompt_is_continued_after_the_end_of_the_thinking(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        closed = "</think>" in body["prompt"]
        return [{"text": "7"} if closed else {"text": "<think>\nHm", "finish_reason": "length"}]

    server.reply = reply
    (completion,) = remote().generate([Request(prompt="q: ", sampling=Sampling(thinking=20, max_tokens=5))])
    assert completion.text == "7"
    assert [post.body["prompt"] for post in server.posts] == ["q: ", "q: <think>\nHm\n</think>\n\n"]
    assert [post.body["max_tokens"] for post in server.posts] == [25, 5]


def test_choices_are_found_after_the_thinking(server: Any, remote: Any) -> None:
    server.reply = thinker = Thinker()
    (completion,) = remote().generate([ask(choices=("10", "7"))])
    assert [one.total for one in completion.choice_logprobs] == [-100.0, 0.0]
    assert [body["max_tokens"] for body in thinker.bodies] == [24, 24 + 4096]
    assert completion.usage.new_tokens == 6


def test_a_spent_budget_ends_a_text_in_its_thinking(server: Any, remote: Any) -> None:
    server.reply = Thinker()
    decoder, meter = remote(server="vllm"), Meter(Budget(tokens=2))

    async def run() -> list[Completion]:
        (pending,) = decoder.start([ask(thinking=20, max_tokens=20)], meter)
        return await pending

    (completion,) = asyncio.run(run())
    assert (completion.text, completion.finish_reason) == ("", "budget")
    assert len(server.posts) == 1
