"""Every decoding method can be selected by the model's name, and returns the same as locally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tot.decoders import Message, Request, Sampling, load_decoder

HOT = {"temperature": 1.0, "max_tokens": 40, "seed": 7}


@pytest.mark.parametrize("method", ["auto", "sd", "mcsd", "seed", "jacobi", "lookahead", "fastcot"])
def test_exact_methods_return_the_text_of_ar(client: openai.OpenAI, says: Any, method: str) -> None:
    request = {"messages": says("Go on and on."), "n": 2, **HOT}  # language: ok
    expected = client.chat.completions.create(model="tiny:ar", **request)
    reply = client.chat.completions.create(model=f"tiny:{method}", **request)
    assert reply.choices == expected.choices
    assert reply.tot == {"decoder": method, "seed": 7}
    assert reply.model == f"tiny:{method}"


def test_drafts_are_counted_in_the_usage(serve: Any, says: Any, tiny: Any, tmp_path: Path) -> None:
    with tiny() as decoder:
        model = decoder.model
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(tmp_path)
        decoder.tokenizer.save_pretrained(tmp_path)
    server = serve(options={"k": "3", "draft": str(tmp_path)})
    request: dict[str, Any] = {"messages": says("Go on."), **HOT, "temperature": 0.0}  # language: ok
    with server.client() as client:
        drafting, plain = (client.chat.completions.create(model=model, **request) for model in ("tiny:sd", "tiny"))
    assert drafting.choices == plain.choices
    assert drafting.usage.drafted_tokens > drafting.usage.accepted_tokens
    assert drafting.usage.forwards == plain.usage.forwards - drafting.usage.accepted_tokens
    assert plain.usage.drafted_tokens == 0
    assert server.metric("tot_drafted_tokens_total") == drafting.usage.drafted_tokens
    assert server.metric("tot_accepted_tokens_total") == drafting.usage.accepted_tokens
    assert server.metric("tot_reached_positions_total") == drafting.usage.reached_positions
    assert drafting.usage.accepted_tokens <= drafting.usage.reached_positions <= drafting.usage.drafted_tokens


def test_pdos_decodes_the_steps_given_by_a_client(server: Any, client: openai.OpenAI, says: Any) -> None:
    steps = ["One", "Two"]
    reply = client.chat.completions.create(
        model="tiny:pdos", messages=says("Weigh both."), extra_body={"steps": steps}, **HOT
    )
    (choice,) = reply.choices
    prompt = (Message(role="user", content="Weigh both."),)
    local = load_decoder("pdos", engine=server.decoder.engine)
    (expected,) = local.generate([Request(prompt=prompt, steps=tuple(steps), sampling=Sampling(**HOT))])
    assert choice.message.content == expected.text
    assert [part["kind"] for part in choice.parts] == [part.kind for part in expected.parts]
    assert [part["text"].strip().partition(":")[0] for part in choice.parts if part["kind"] == "step"] == [
        "#### One",
        "#### Two",
    ]
    pieces = client.chat.completions.create(
        model="tiny:pdos", messages=says("Weigh both."), extra_body={"steps": steps}, stream=True, **HOT
    )
    chunks = [chunk.choices[0] for chunk in pieces]
    assert "".join(choice.delta.content or "" for choice in chunks) == expected.text
    assert chunks[-1].parts == choice.parts


def test_steps_for_another_decoder_are_refused(client: openai.OpenAI, says: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"steps are only for pdos.* use the model tiny:pdos"):
        client.chat.completions.create(model="tiny:seed", messages=says("Hm."), extra_body={"steps": ["One"]})


@pytest.mark.parametrize("method", ["ar", "fastcot"])
def test_a_rationale_is_followed_by_trigger_and_answer(serve: Any, says: Any, method: str) -> None:
    server = serve(options={"cap": "4", "window": "3"})
    extra = {"answer_trigger": " The answer is", "answer_tokens": 5}
    with server.client() as client:
        reply = client.chat.completions.create(model=f"tiny:{method}", messages=says("5 + 5?"), extra_body=extra, **HOT)
    (choice,) = reply.choices
    kinds = [part["kind"] for part in choice.parts]
    assert kinds[0] == "exact"
    assert kinds[-2:] == ["trigger", "exact"]
    assert ("approximate" in kinds) == (method == "fastcot")
    assert reply.usage.approximate_tokens == (3 if method == "fastcot" else 0)
    assert choice.message.content == "".join(part["text"] for part in choice.parts)
    assert choice.message.content.endswith(f" The answer is{choice.answer}")


def test_an_invalid_option_is_reported_when_its_decoder_is_requested(serve: Any, says: Any) -> None:
    server = serve(options={"k": "many"})
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match=r"decoder sd, option k: .*"):
            client.chat.completions.create(model="tiny:sd", messages=says("Hm."))
        assert client.chat.completions.create(model="tiny", messages=says("Hm."), max_tokens=2).choices
