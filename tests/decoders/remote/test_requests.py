"""Requests sent to a server, and its replies: routes, fields, samples, seeds, finish reasons, tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tot.decoders import Message, OptionError, Request, RequestError, Sampling, Usage

TWO = {"continue_final_message": True, "add_generation_prompt": False}


def chat(*texts: str) -> tuple[Message, ...]:
    """Return messages with alternating roles, the user's first."""
    return tuple(Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts))


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=chat(text), sampling=Sampling(**sampling))


# -- the body -----------------------------------------------------------------------------------------------------


def test_a_body_has_only_the_fields_that_every_server_knows(server: Any, remote: Any) -> None:
    remote().generate([ask(max_tokens=7, seed=3)])
    assert [(asked.path, asked.body) for asked in server.posts] == [
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "q"}],
                "max_tokens": 7,
                "temperature": 0.0,
                "seed": 3,
            },
        )
    ]


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
    assert (asked.path, asked.body["prompt"]) == ("/v1/completions", sent)
    assert completion.text == server.hashed("", asked.body)[0]["text"]


def test_messages_go_to_completions_as_one_text_if_requested(server: Any, remote: Any) -> None:
    remote(api="completions").generate([Request(prompt=chat("a", "b"))])
    (asked,) = server.posts
    assert (asked.path, asked.body["prompt"], "messages" in asked.body) == ("/v1/completions", "a\n\nb", False)


def test_served_sets_the_model_name_at_the_server(server: Any, remote: Any) -> None:
    decoder = remote(served="other/name")
    decoder.generate([ask()])
    assert (server.posts[0].body["model"], decoder.model) == ("other/name", "other/name")


# -- continued assistant messages ---------------------------------------------------------------------------------


def test_a_last_assistant_message_is_continued(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: [{"text": " 42.", "finish_reason": "stop"}]
    (completion,) = remote().generate([Request(prompt=chat("q", "The answer is"))])
    assert TWO.items() <= server.posts[0].body.items()
    assert completion.text == " 42."


def test_a_server_that_refuses_to_continue_sends_a_reply_whose_repeated_prefix_is_removed(
    server: Any, remote: Any
) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if "continue_final_message" in body:
            return 422, {"detail": "Unexpected fields in the request: {'continue_final_message'}"}
        return [{"text": "The answer is 42." if body.get("seed") else "It is 41.", "finish_reason": "stop"}]

    server.reply, server.continues = reply, False
    decoder = remote()
    requests = [Request(prompt=chat("q", "The answer is "), sampling=Sampling(seed=seed)) for seed in (1, 0)]
    assert [one.text for one in decoder.generate(requests[:1])] == ["42."]
    assert [one.text for one in decoder.generate(requests)] == ["42.", "It is 41."]
    assert len(server.posts) == 3  # the probe found once that the fields are refused, and the decoder remembers it


def test_an_empty_prefix_is_refused(remote: Any) -> None:
    with pytest.raises(RequestError, match="prefix is empty"):
        remote().generate([Request(prompt=chat("q", " "))])


# -- samples ------------------------------------------------------------------------------------------------------


def test_samples_are_returned_request_by_request_in_order(server: Any, remote: Any) -> None:
    requests = [ask(f"q{i}", temperature=1, n=3, seed=i) for i in range(20)]
    texts = [completion.text for completion in remote().generate(requests)]
    by_prompt = {asked.body["messages"][0]["content"]: asked.body for asked in server.posts}
    expected = [reply["text"] for i in range(20) for reply in server.hashed("", by_prompt[f"q{i}"])]
    assert texts == expected
    assert len(set(texts)) == 60
    assert len(server.posts) == 20


def test_choices_are_sorted_by_index(server: Any, remote: Any) -> None:
    def backwards(path: str, body: dict[str, Any]) -> Any:
        return [{"text": f"s{i}", "finish_reason": "stop", "index": i} for i in (2, 0, 1)]

    server.reply = backwards
    assert [one.text for one in remote().generate([ask(temperature=1, n=3)])] == ["s0", "s1", "s2"]


def test_a_server_that_ignores_n_gets_one_request_per_sample_with_its_own_seed(server: Any, remote: Any) -> None:
    server.takes_n = False
    decoder = remote()
    first = [one.text for one in decoder.generate([ask(temperature=1, n=3, seed=9)])]
    assert [asked.body.get("n") for asked in server.posts] == [3, None, None]
    again = [one.text for one in decoder.generate([ask(temperature=1, n=3, seed=9)])]
    assert [asked.body.get("n") for asked in server.posts[3:]] == [None, None, None]
    seeds = [asked.body["seed"] for asked in server.posts]
    assert len(set(seeds)) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert first == again
    assert len(set(first)) == 3


def test_a_server_that_refuses_n_gets_one_request_per_sample(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if "n" in body:
            return 400, {"error": {"message": "Only one completion choice is allowed: 'n' must be 1", "code": 400}}
        return server.hashed(path, body)

    server.reply = reply
    done = remote().generate([ask(f"q{i}", temperature=1, n=2, seed=i) for i in range(3)])
    assert len({one.text for one in done}) == 6
    assert sum("n" not in asked.body for asked in server.posts) == 6


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


def test_a_refused_field_that_is_needed_ends_in_the_servers_message(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: (400, {"error": {"message": "Unrecognized request argument: top_k"}})
    with pytest.raises(RequestError, match=r"rejects the request \(400\): Unrecognized request argument: top_k"):
        remote().generate([ask(top_k=3)])
    assert len(server.posts) == 1


# -- finish reasons and usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "stop", "text", "reason"),
    [
        ({"text": "a b", "finish_reason": "stop"}, (), "a b", "eos"),
        ({"text": "a b", "finish_reason": "stop"}, ("x",), "a b", "stop"),
        ({"text": "a b", "finish_reason": "stop", "stop_reason": None}, ("x",), "a b", "eos"),
        ({"text": "a b", "finish_reason": "stop", "stop_reason": "x"}, ("x",), "a b", "stop"),
        ({"text": "a b", "finish_reason": "length"}, ("x",), "a b", "length"),
        ({"text": "a xb", "finish_reason": "length"}, ("x", " "), "a", "stop"),
    ],
)
def test_finish_reasons_follow_the_reply(
    server: Any, remote: Any, choice: dict[str, Any], stop: tuple[str, ...], text: str, reason: str
) -> None:
    server.reply = lambda path, body: [choice]
    (completion,) = remote().generate([ask(stop=stop)])
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_tokens_and_cost_are_the_servers_counts(server: Any, remote: Any) -> None:
    decoder = remote(input_price=2.0, cached_price=0.5, output_price=10.0)
    done = decoder.generate([ask(temperature=1, n=2, seed=1), ask("b")])
    cost = (6 * 2.0 + 4 * 0.5 + 6 * 10.0) / 1e6
    first = done[0].usage
    assert (first.prompt_tokens, first.reused_prompt_tokens, first.new_tokens, first.forwards) == (10, 4, 3, 0)
    assert first.cost == pytest.approx(cost)
    assert (done[1].usage.prompt_tokens, done[1].usage.new_tokens, done[1].usage.cost) == (0, 3, 0.0)
    spent = decoder.spent.usage
    assert (decoder.spent.requests, decoder.spent.retries) == (2, 0)
    assert (spent.prompt_tokens, spent.reused_prompt_tokens, spent.new_tokens) == (20, 8, 9)
    assert spent.cost == pytest.approx(sum(one.usage.cost for one in done))
    assert spent.cost == pytest.approx(cost + (6 * 2.0 + 4 * 0.5 + 3 * 10.0) / 1e6)


def test_new_tokens_that_do_not_divide_evenly_are_all_counted(server: Any, remote: Any) -> None:
    reply = {"choices": [{"index": i, "message": {"content": "x"}} for i in range(3)]}
    server.reply = lambda path, body: reply | {"usage": {"prompt_tokens": 5, "completion_tokens": 8}}
    done = remote().generate([ask(temperature=1, n=3)])
    assert [one.usage.new_tokens for one in done] == [3, 3, 2]


def test_a_server_without_counts_causes_one_warning(server: Any, remote: Any, caplog: Any) -> None:
    server.reply = lambda path, body: {"choices": [{"message": {"content": "x"}}]}
    done = remote().generate([ask(), ask("b")])
    assert [one.usage.new_tokens for one in done] == [0, 0]
    assert sum("number of new tokens" in record.message for record in caplog.records) == 1


def test_log_probabilities_are_requested_only_by_the_option(server: Any, remote: Any) -> None:
    content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]
    server.reply = lambda path, body: [
        {
            "text": "ab",
            "logprobs": {"content": content}
            if path.endswith("chat/completions")
            else {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]},
        }
    ]
    (without,) = remote().generate([ask()])
    assert math.isnan(without.logprob)
    chatted, completed = remote(logprobs=True).generate([ask(), Request(prompt="text")])
    assert (chatted.logprob, completed.logprob) == (-0.75, -3.0)
    assert [asked.body.get("logprobs") for asked in server.posts] == [None, True, 0]


def test_missing_log_probabilities_are_an_error_if_requested(remote: Any) -> None:
    with pytest.raises(RequestError, match="returned no log-probabilities: remove the option logprobs"):
        remote(logprobs=True).generate([ask()])


# -- rationales ---------------------------------------------------------------------------------------------------


def test_an_answer_trigger_sends_two_requests_and_parts_have_kinds(server: Any, remote: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        last = body["messages"][-1]
        return [{"text": " 7" if last["role"] == "assistant" else "3 + 4.", "finish_reason": "stop"}]

    server.reply = reply
    request = Request(
        prompt=chat("q"), sampling=Sampling(max_tokens=50, seed=5), answer_trigger=" So:", answer_tokens=6
    )
    (completion,) = remote().generate([request])
    first, second = (asked.body for asked in server.posts)
    assert second["messages"][-1] == {"role": "assistant", "content": "3 + 4. So:"}
    assert TWO.items() <= second.items()
    assert (first["max_tokens"], second["max_tokens"], first["seed"] == second["seed"]) == (50, 6, False)
    assert (completion.text, completion.answer) == ("3 + 4. So: 7", " 7")
    assert [(part.kind, part.text) for part in completion.parts] == [
        ("exact", "3 + 4."),
        ("trigger", " So:"),
        ("exact", " 7"),
    ]
    assert (completion.usage.prompt_tokens, completion.usage.new_tokens) == (20, 6)


def test_each_of_n_rationales_gets_its_own_answer(server: Any, remote: Any) -> None:
    request = Request(prompt="text", sampling=Sampling(temperature=1, n=3), answer_trigger=" =>")
    done = remote().generate([request])
    rationales = [one.parts[0].text for one in done]
    assert sorted(asked.body["prompt"] for asked in server.posts[1:]) == sorted(f"text{one} =>" for one in rationales)
    assert len({asked.body["seed"] for asked in server.posts}) == 4
    assert [one.text for one in done] == [f"{one.parts[0].text} =>{one.answer}" for one in done]


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
        ({"api": "chit-chat"}, "option api: Input should be 'chat' or 'completions'"),
        ({"extra": "{not json"}, "option extra: not JSON"),
        ({"extra": '{"n": 3}'}, "the decoder sets n itself"),
        ({"draft": "lookup"}, "option draft: unknown"),
        ({"dtype": "fp32"}, "dtype is for local models"),
        ({"kv_budget": 100}, "kv_budget is for local models"),
        ({"threads": 2}, "threads is for local models"),
    ],
)
def test_invalid_options_are_named(remote: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        remote(**options)


def test_usage_adds_up_with_its_cost() -> None:
    assert Usage(1, 2, 3, cost=0.5) + Usage(1, 1, 1, cost=0.25) == Usage(2, 3, 4, cost=0.75)
