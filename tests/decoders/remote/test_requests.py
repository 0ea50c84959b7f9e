"""Requests sent to a server: routes, fields, samples, seeds, tokens, rationales and options."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tot.decoders import Constraint, Message, OptionError, Request, RequestError, Sampling

TWO = {"continue_final_message": True, "add_generation_prompt": False}


def chat(*texts: str) -> tuple[Message, ...]:
    """Return messages with alternating roles, the user's first."""
    return tuple(Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts))


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=chat(text), sampling=Sampling(**sampling))


# -- the body -----------------------------------------------------------------------------------------------------


def test_a_body_has_only_the_fields_that_every_server_knows(server: Any, remote: Any) -> None:
    remote().generate([ask(max_tokens=7, seed=3)])
    (asked,) = server.posts
    messages = [{"role": "user", "content": "q"}]
    expected = {"model": "tiny", "messages": messages, "max_tokens": 7, "temperature": 0.0, "seed": 3}
    assert (asked.path, asked.body) == ("/v1/chat/completions", expected)


def test_optional_fields_are_sent_if_requested(server: Any, remote: Any) -> None:
    sampling = {"top_k": 5, "min_p": 0.1, "top_p": 0.9, "ignore_eos": True, "stop": ("\n", "x"), "temperature": 0.5}
    remote(extra='{"chat_template_kwargs": {"enable_thinking": false}}').generate([ask(**sampling)])
    (asked,) = server.posts
    assert {name: asked.body[name] for name in sampling} == sampling | {"stop": ["\n", "x"]}
    assert asked.body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(("prompt", "sent"), [("some text", "some text"), ((3, 4, 5), [3, 4, 5])])
def test_texts_and_token_ids_go_to_completions(server: Any, remote: Any, prompt: Any, sent: Any) -> None:
    (completion,) = remote().generate([Request(prompt=prompt)])
    (asked,) = server.posts
    assert (asked.path, asked.body["prompt"], "messages" in asked.body) == ("/v1/completions", sent, False)
    assert completion.text == server.hashed("", asked.body)[0]["text"]


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_server_that_ignores_n_gets_one_request_per_sample_with_its_own_seed(server: Any, remote: Any) -> None:
    server.takes_n = False
    decoder = remote()
    first, again = ([one.text for one in decoder.generate([ask(temperature=1, n=3, seed=9)])] for _ in range(2))
    assert [asked.body.get("n") for asked in server.posts] == [3, None, None, None, None, None]
    seeds = [asked.body["seed"] for asked in server.posts]
    assert len(set(seeds)) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert first == again
    assert len(set(first)) == 3


@pytest.mark.parametrize("status", [400, 422, 500, 501])
@pytest.mark.parametrize("words", ["Only one completion choice is allowed", "n>1 not supported", "assert width == 1"])
def test_a_server_that_refuses_several_samples_gets_one_sample_per_request(
    server: Any, remote: Any, status: int, words: str
) -> None:
    def refuse(path: str, body: dict[str, Any]) -> Any:
        return (status, {"error": {"message": words}}) if "n" in body else server.hashed(path, body)

    server.reply = refuse
    decoder = remote()
    assert len({one.text for one in decoder.generate([ask(temperature=1, n=3, seed=s) for s in (1, 2)])}) == 6
    before = len(server.posts)
    decoder.generate([ask(temperature=1, n=3, seed=8)])
    assert not any("n" in post.body for post in server.posts[before:])


def test_at_temperature_0_samples_are_equal_and_requested_once(server: Any, remote: Any) -> None:
    done = remote().generate([ask(n=3)])
    assert len({one.text for one in done}) == 1
    assert [one.usage.new_tokens for one in done] == [3, 0, 0]
    assert ["n" in asked.body for asked in server.posts] == [False]


def test_seeds_fit_every_server_and_stay_distinct(server: Any, remote: Any) -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 12345678901234567890]
    remote().generate([ask(f"q{i}", seed=seed, temperature=1) for i, seed in enumerate(seeds)])
    sent = [asked.body["seed"] for asked in server.posts]
    assert all(0 <= seed < 2**31 for seed in sent)
    assert len(set(sent)) == len(seeds)


@pytest.mark.parametrize("takes_n", [True, False])
def test_identical_samples_cause_one_warning(server: Any, remote: Any, caplog: Any, takes_n: bool) -> None:
    text = "The same long text, from a cache."
    server.reply = lambda path, body: [{"text": text}] * (body.get("n", 1) if takes_n else 1)
    remote().generate([ask(temperature=0.7, n=3), ask(temperature=0.7, n=3)])
    assert caplog.text.count("all 3 samples at temperature 0.7 have the same text") == 1


# -- fields with other names --------------------------------------------------------------------------------------


def test_a_server_that_needs_max_completion_tokens_gets_it_from_then_on(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return 400, {"error": {"message": message, "param": "max_tokens"}}
        return server.hashed(path, body)

    server.reply = reply
    decoder = remote()
    decoder.generate([ask(max_tokens=9)])
    decoder.generate([ask("other", max_tokens=9)])
    assert [asked.body.get("max_completion_tokens") for asked in server.posts] == [None, 9, 9]


def test_a_server_that_takes_no_seed_gets_none_and_a_warning_is_logged(server: Any, remote: Any, caplog: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        return (422, {"detail": "extra_forbidden: seed"}) if "seed" in body else server.hashed(path, body)

    server.reply = reply
    assert len(remote().generate([ask(), ask("b")])) == 2
    assert [record.message for record in caplog.records if "seed" in record.message] == [
        "this server does not accept a seed: its samples are not reproducible"
    ]


# -- usage and log-probabilities ----------------------------------------------------------------------------------


def test_new_tokens_that_do_not_divide_evenly_are_all_counted(server: Any, remote: Any) -> None:
    reply = {"choices": [{"index": i, "message": {"content": "x"}} for i in range(3)]}
    server.reply = lambda path, body: reply | {"usage": {"prompt_tokens": 5, "completion_tokens": 8}}
    done = remote().generate([ask(temperature=1, n=3)])
    assert [one.usage.new_tokens for one in done] == [3, 3, 2]


def test_a_server_without_counts_causes_one_warning(server: Any, remote: Any, caplog: Any) -> None:
    server.reply = lambda path, body: {"choices": [{"message": {"content": "x"}}]}
    done = remote().generate([ask(), ask("b")])
    assert [one.usage.new_tokens for one in done] == [0, 0]
    assert caplog.text.count("number of new tokens") == 1


@pytest.mark.parametrize(("counted", "warned"), [(5, True), (900, False), (0, False)])
def test_a_possibly_truncated_prompt_causes_a_warning(
    server: Any, remote: Any, caplog: Any, counted: int, warned: bool
) -> None:
    usage = {"prompt_tokens": counted, "completion_tokens": 1}
    server.reply = lambda path, body: {"choices": [{"message": {"content": "7"}}], "usage": usage}
    remote().generate([ask("word " * 900)])
    assert ("it may have truncated the prompt" in caplog.text) is warned


def test_log_probabilities_are_requested_only_by_the_option(server: Any, remote: Any) -> None:
    content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]
    listed = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}
    server.reply = lambda path, body: [{"text": "ab", "logprobs": {"content": content} if "chat" in path else listed}]
    (without,) = remote().generate([ask()])
    assert math.isnan(without.logprob)
    chatted, completed = remote(logprobs=True).generate([ask(), Request(prompt="text")])
    assert (chatted.logprob, chatted.logprobs, completed.logprob) == (-0.75, (-0.5, -0.25), -3.0)
    assert [asked.body.get("logprobs") for asked in server.posts] == [None, True, 0]


@pytest.mark.parametrize("reply", [[{"text": "a"}], (400, {"error": {"message": "This model has no logprobs"}})])
def test_missing_log_probabilities_are_an_error_if_requested(server: Any, remote: Any, reply: Any) -> None:
    server.reply = lambda path, body: reply
    with pytest.raises(RequestError, match=r"(logprobs|log-probabilities): remove the option logprobs"):
        remote(logprobs=True).generate([ask()])


# -- rationales ---------------------------------------------------------------------------------------------------


def test_an_answer_trigger_sends_two_requests_and_parts_have_kinds(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": " 7" if body["messages"][-1]["role"] == "assistant" else "3 + 4."}]
    sampling = Sampling(max_tokens=50, seed=5)
    request = Request(prompt=chat("q"), sampling=sampling, answer_trigger=" So:", answer_tokens=6)
    (completion,) = remote(server="vllm").generate([request])
    first, second = (asked.body for asked in server.posts)
    assert second["messages"][-1] == {"role": "assistant", "content": "3 + 4. So:"}
    assert TWO.items() <= second.items()
    assert (first["max_tokens"], second["max_tokens"], first["seed"] == second["seed"]) == (50, 6, False)
    assert (completion.text, completion.answer) == ("3 + 4. So: 7", " 7")
    parts = [("exact", "3 + 4."), ("trigger", " So:"), ("exact", " 7")]
    assert [(part.kind, part.text) for part in completion.parts] == parts
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens) == (20, 6)


def test_token_ids_cannot_be_continued_in_text(remote: Any) -> None:
    with pytest.raises(RequestError, match="cannot append text to a prompt of token ids"):
        remote().generate([Request(prompt=(1, 2), answer_trigger=" So:")])


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"bse_url": "x"}, r"option base_url: Field required|option bse_url: unknown, did you mean base_url"),
        ({"base_url": "127.0.0.1:8000"}, "not an address: write http://host:port/v1"),
        ({"base_url": "http://127.0.0.1:port/v1"}, "not an address"),
        ({"concurrency": 0}, "option concurrency: Input should be greater than or equal to 1"),
        ({"api": "completions"}, "option api: was removed: start the server with a chat template"),
        ({"thinking_tokens": 9}, "option thinking_tokens: was removed: give the budget as thinking=TOKENS"),
        ({"extra": "{not json"}, "option extra: not JSON"),
        ({"extra": '{"n": 3}'}, "the decoder sets n itself"),
        ({"draft": "lookup"}, "option draft: unknown"),
        ({"input_price": 1.0}, "option input_price: was removed: multiply the tokens of results.json"),
        ({"dtype": "fp32"}, "dtype is for local models"),
        ({"kv_budget": 100}, "kv_budget is for local models"),
        ({"threads": 2}, "threads is for local models"),
    ],
)
def test_invalid_options_are_named(remote: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        remote(**options)


# -- constraints --------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vllm", {"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ("vllm", {"choices": ("a", "b")}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ("vllm", {"lark": "start: /a/"}, {"structured_outputs": {"grammar": "start: /a/"}}),
    ("sglang", {"json_schema": SCHEMA}, {"response_format": FORMAT}),
    ("sglang", {"choices": ("a.", "b")}, {"regex": r"a\.|b"}),
    ("llama-server", {"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
    ("llama-server", {"choices": ('"a"', "b\n")}, {"grammar": r'root ::= "\"a\"" | "b\n"'}),
    ("ollama", {"json_schema": SCHEMA}, {"response_format": FORMAT}),
    ("openai", {"json_schema": SCHEMA}, {"response_format": FORMAT}),
    ("tot", {"regex": "a+"}, {"constraint": {"regex": "a+"}}),
]


@pytest.mark.parametrize(("kind", "given", "fields"), FIELDS)
def test_a_constraint_is_sent_in_the_form_of_the_server(
    server: Any, remote: Any, kind: str, given: dict[str, Any], fields: dict[str, Any]
) -> None:
    request = Request(prompt=chat("q"), constraint=Constraint(**given))
    free = Request(prompt=chat("q"))
    server.reply = lambda path, body: [{"text": '{"a": 1}'}]
    remote(server=kind).generate([request, free])
    constrained, other = (asked.body for asked in server.posts)
    if not any(name in constrained for name in fields):
        constrained, other = other, constrained
    assert {name: value for name, value in constrained.items() if name not in other} == fields


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "openai",
            {"regex": "a"},
            "OpenAI's protocol has no constraint of the kind regex: use json_schema, vLLM or tot",
        ),
        ("llama-server", {"lark": "start: /a/"}, "llama-server has no constraint of the kind lark"),
        ("ollama", {"choices": ("a",)}, "Ollama has no constraint of the kind choices"),
    ],
)
def test_a_constraint_that_a_server_lacks_is_refused(
    server: Any, remote: Any, kind: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        remote(server=kind, output_retries=0).generate([Request(prompt=chat("q"), constraint=Constraint(**given))])
    text = Request(prompt="q", constraint=Constraint(json_schema=SCHEMA))
    with pytest.raises(RequestError, match="has JSON schemas in chats only: give the prompt as messages"):
        remote(server="openai", output_retries=0).generate([text])
    assert server.posts == []


def test_only_the_answer_after_a_trigger_is_constrained(server: Any, remote: Any) -> None:
    request = Request(prompt=chat("q"), answer_trigger=" So", constraint=Constraint(choices=("a",)))
    remote(server="vllm").generate([request])
    assert ["structured_outputs" in asked.body for asked in server.posts] == [False, True]
