"""Hidden states of completions equal transformers', for every method, backend and reused prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tot.decoders import Completion, Request, RequestError, Sampling, load_decoder
from tot.decoders.kernels.native.forward import NativeForward

LAYERS = (2, 0, 1)
METHODS = [
    *[("ar", {}), ("sd", {}), ("sd", {"rule": "leviathan"}), ("mcsd", {"rule": "mcsd"})],
    *[("seed", {}), ("seed", {"policy": "rounds"}), ("jacobi", {}), ("lookahead", {}), ("fastcot", {})],
    ("pdos", {"instructions": ""}),
]


@pytest.fixture(scope="module")
def alone() -> Callable[..., Tensor]:
    """Return transformers' hidden states of a text: (tokens, layers, hidden)."""

    def run(model: Any, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            result = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        return torch.stack([result.hidden_states[layer][0] for layer in LAYERS], dim=1)

    return run


@pytest.fixture
def check_states(make_model: Callable[..., Any], alone: Callable[..., Tensor]) -> Callable[..., None]:
    """Check a completion's states against a model created like the decoder's."""

    def check(done: Completion, prompt: list[int], family: str = "llama", off: float = 2e-3, **changes: Any) -> None:
        expected = alone(make_model(family, readable=True, **changes), [*prompt, *done.tokens])[len(prompt) - 1 :]
        assert done.states.dtype == np.float16
        rows = len(done.states)
        assert len(done.tokens) <= rows <= len(done.tokens) + 1
        torch.testing.assert_close(torch.from_numpy(done.states).float(), expected[:rows], atol=off, rtol=off)
        assert expected.std() > 0.1

    return check


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_every_method_returns_the_state_that_each_token_was_sampled_from(
    method: str,
    options: dict[str, Any],
    make_model: Callable[..., Any],
    tokenizer: Any,
    check_states: Callable[..., None],
) -> None:
    model = make_model(readable=True)
    sampling = Sampling(max_tokens=24, temperature=0.8, n=2, seed=3, ignore_eos=True)
    with load_decoder(method, model, tokenizer=tokenizer, kv_budget=4000, **options) as decoder:
        for prompt in ("the rain in the", "the rain in the", "the rain in the end"):
            ask = Request(prompt=prompt, sampling=sampling, states=LAYERS)
            done = decoder.generate([ask])
            assert len(done) == 2
            prepared = ask if decoder.method.prepare is None else decoder.method.prepare(ask)
            for one in done:
                assert len(one.tokens) == len(one.states) == 24
                check_states(one, decoder.engine.codec.encode_prompt(prepared.prompt))
        assert done[0].usage.reused_prompt_tokens > 0


def test_parallel_steps_have_a_state_per_token(make_model: Callable[..., Any], tokenizer: Any) -> None:
    ask = Request(prompt="the rain", sampling=Sampling(max_tokens=60), steps=("One", "Two"), states=(1,))
    with load_decoder("pdos", make_model(readable=True), tokenizer=tokenizer, kv_budget=4000) as decoder:
        (done,) = decoder.generate([ask])
    assert [part.kind for part in done.parts].count("step") == 2
    assert len(done.states) == len(done.tokens) > 10


@pytest.mark.parametrize(("family", "changes"), [("qwen2", {}), ("gemma2", {}), ("llama", {"hidden_act": "gelu"})])
def test_forwards_in_c_and_by_transformers_give_the_same_states(
    family: str,
    changes: dict[str, Any],
    make_model: Callable[..., Any],
    tokenizer: Any,
    check_states: Callable[..., None],
) -> None:
    model = make_model(family, readable=True, **changes)
    with load_decoder("ar", model, tokenizer=tokenizer, kv_budget=4000) as decoder:
        assert isinstance(decoder.engine.runner.backend, NativeForward) in {not changes, False}
        (done,) = decoder.generate([Request(prompt="in the", sampling=Sampling(max_tokens=9), states=LAYERS)])
        check_states(done, decoder.engine.codec.encode_prompt("in the"), family, **changes)


def test_a_text_kept_up_to_its_stop_ends_with_its_own_state(
    make_model: Callable[..., Any], tokenizer: Any, check_states: Callable[..., None]
) -> None:
    with load_decoder("ar", make_model(readable=True), tokenizer=tokenizer, kv_budget=4000) as decoder:
        prompt = decoder.engine.codec.encode_prompt("the rain")
        ask = Request(prompt=tuple(prompt), sampling=Sampling(max_tokens=40, ignore_eos=True), states=LAYERS)
        (whole,) = decoder.generate([ask])
        stop = whole.text[5:7]
        stopping = ask.sampling.model_copy(update={"stop": (stop,), "keep_stop": True})
        (done,) = decoder.generate([ask.model_copy(update={"sampling": stopping})])
        assert (done.finish_reason, whole.text.startswith(done.text)) == ("stop", True)
        assert len(done.states) == len(done.tokens) + 1
        check_states(done, prompt)
        continued = (*prompt, *done.tokens)
        rest = stopping.model_copy(update={"stop": (), "drawn": len(done.tokens), "max_tokens": 40 - len(done.tokens)})
        (more,) = decoder.generate([ask.model_copy(update={"prompt": continued, "sampling": rest})])
        check_states(done.then(more), prompt)
        assert done.then(more).tokens == whole.tokens


def test_states_take_no_forward_and_are_returned_on_request_only(
    make_model: Callable[..., Any], tokenizer: Any
) -> None:
    asks = [Request(prompt=f"the rain {i}", sampling=Sampling(max_tokens=8, ignore_eos=True)) for i in range(3)]
    forwards, tokens = [], []
    for layers in ((), (1,)):
        with load_decoder("ar", make_model(readable=True), tokenizer=tokenizer, kv_budget=4000) as decoder:
            done = decoder.generate([*asks[:2], asks[2].model_copy(update={"states": layers})])
            forwards.append(decoder.engine.forwards)
            tokens.append([one.tokens for one in done])
    assert forwards[0] == forwards[1]
    assert tokens[0] == tokens[1]
    assert [one.states is None for one in done] == [True, True, False]
    assert done[2].states.shape == (8, 1, 48)


def test_each_request_gets_its_own_layers(make_model: Callable[..., Any], tokenizer: Any) -> None:
    ask = Request(prompt="the rain", sampling=Sampling(max_tokens=5, ignore_eos=True))
    with load_decoder("ar", make_model(readable=True), tokenizer=tokenizer, kv_budget=4000) as decoder:
        done = decoder.generate([ask.model_copy(update={"states": layers}) for layers in ((1,), (2, 0), (0, 1, 2))])
    one, two, three = (completion.states for completion in done)
    assert np.array_equal(one, three[:, [1]])
    assert np.array_equal(two, three[:, [2, 0]])


def test_requests_for_states_that_do_not_exist_are_refused(tiny: Any) -> None:
    with tiny() as decoder:
        with pytest.raises(RequestError, match="the model has no layer 3: ask for states of layers 0 to 2"):
            decoder.generate([Request(prompt="a", states=(0, 3))])
        (done,) = decoder.generate([Request(prompt="a", sampling=Sampling(max_tokens=2), states=(2,))])
        assert done.states is not None
    with pytest.raises(ValueError, match="choices alone are only scored"):
        Request(prompt="a", choices=("b", "c"), states=(1,))
