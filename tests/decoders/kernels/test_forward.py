"""The native forward in C against the transformers model, for each supported family."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from tot.decoders import OptionError, Request, Sampling, load_decoder, machine
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.kernels.backend import open_backend
from tot.decoders.kernels.module import TransformersForward
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.forward import NativeForward, native_forward
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import LoadedModel


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rounded", [False, True])
def test_the_native_forward_gives_the_models_logits(
    text: Callable[..., Any],
    computed: Callable[..., Any],
    known: Callable[..., Any],
    logits_alone: Callable[..., Tensor],
    family: str,
    rounded: bool,
) -> None:
    model = known(family)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    reference, runner = copy.deepcopy(model), Runner(LoadedModel.of(model), 6000)
    assert isinstance(runner.backend, NativeForward)
    assert runner.backend.weights == ("bfloat16" if rounded else "float32")
    for count in (1, 2, 3, 4, 5, 7, 12, 13, 26):
        texts = [text(20 + 9 * i, seed=count + i) for i in range(count)]
        for tokens, logits in zip(texts, computed(runner, texts), strict=True):
            expected = logits_alone(reference, tokens)[-1]
            torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-4)
    runner.close()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
)  # fmt: skip
def test_rotary_embeddings_equal_the_models_at_any_position(
    text: Callable[..., Any],
    computed: Callable[..., Any],
    known: Callable[..., Any],
    logits_alone: Callable[..., Tensor],
    rope: dict[str, Any],
) -> None:
    model = known(rope_parameters={"rope_theta": 10_000.0, **rope}, max_position_embeddings=4096)
    reference, runner = copy.deepcopy(model), Runner(LoadedModel.of(model), 4000)
    assert isinstance(runner.backend, NativeForward)
    for length in (30, 1100, 700, 2300):  # more positions than are computed at once, then fewer again
        tokens = text(length, seed=length)
        torch.testing.assert_close(
            computed(runner, [tokens])[0][0], logits_alone(reference, tokens)[-1], atol=2e-3, rtol=1e-4
        )
    runner.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite"])
def test_in_bfloat16_it_is_at_least_as_accurate_as_the_model(
    text: Callable[..., Any],
    computed: Callable[..., Any],
    halved: Callable[..., Any],
    logits_alone: Callable[..., Tensor],
    family: str,
) -> None:
    model = halved(family)
    truth, plain = copy.deepcopy(model).float(), copy.deepcopy(model)
    runner = Runner(LoadedModel.of(model), 6000)
    assert isinstance(runner.backend, NativeForward)
    assert runner.backend.weights == "bfloat16"
    ours, theirs = [], []
    for count in (1, 2, 5, 12, 13, 26):
        texts = [text(20 + 9 * i, seed=count + i) for i in range(count)]
        for tokens, logits in zip(texts, computed(runner, texts), strict=True):
            expected = logits_alone(truth, tokens)[-1]
            ours.append(logits[0] - expected)
            theirs.append(logits_alone(plain, tokens)[-1] - expected)
            assert torch.corrcoef(torch.stack([logits[0], expected]))[0, 1] > 0.99
    assert torch.stack(ours).square().mean() < torch.stack(theirs).square().mean()
    runner.close()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("quantize", [None, "int8-dynamic"])
def test_a_row_does_not_depend_on_the_number_of_rows(
    computed: Callable[..., Any], known: Callable[..., Any], family: str, quantize: Any
) -> None:
    """Results are bit-identical, although 26 rows are divided into other blocks than one row.

    In a mixture, the rows beside a row also choose among its experts."""
    runner = Runner(LoadedModel.of(known(family)), 3000, quantize)
    texts = [[i] for i in range(26)]  # no context, so that attention is not a sum
    together = computed(runner, texts)
    for tokens, logits in zip(texts, together, strict=True):
        for company in (0, 1, 4, 6):
            beside = [[100 + i] for i in range(company)]
            assert torch.equal(computed(runner, [tokens, *beside])[0], logits)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("quantize", [None, "int8-dynamic"])
def test_threads_change_no_bit(
    text: Callable[..., Any], computed: Callable[..., Any], known: Callable[..., Any], family: str, quantize: Any
) -> None:
    runner = Runner(LoadedModel.of(known(family)), 3000, quantize)
    texts = [text(40, seed=i) for i in range(7)]
    results = []
    try:
        for threads in (1, 2, 3, 7, 100):
            machine.use_threads(threads)
            results.append(torch.cat(computed(runner, texts, reads=3)))
    finally:
        machine.use_threads(None)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_sequence_of_forks_rollbacks_and_evictions(
    text: Callable[..., Any], known: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str
) -> None:
    model = known(family)
    reference, runner, rng = copy.deepcopy(model), Runner(LoadedModel.of(model), 400), random.Random(7)
    cache, branches = runner.cache, []
    closed: list[list[int]] = []
    reused = evicted = 0
    for step in range(120):
        if len(branches) < 2 or (len(branches) < 5 and rng.random() < 0.3):
            again = bool(closed) and rng.random() < 0.5
            branches.append(cache.open(rng.choice(closed) if again else text(rng.randint(5, 60), seed=step)))
            reused += again and cache.computed_length(branches[-1]) > 0
            evicted += again and cache.computed_length(branches[-1]) == 0
        chosen = rng.choice(branches)
        match rng.choice(["fork", "extend", "extend", "rollback", "close"]):
            case "fork" if len(branches) < 6:
                branches.append(cache.fork(chosen))
                cache.extend(branches[-1], text(rng.randint(1, 4), seed=-step))
            case "rollback":
                cache.rollback(chosen, rng.randint(1, len(chosen)))
            case "close" if len(branches) > 2:
                closed.append(cache.tokens(chosen))
                cache.rollback(chosen, 0)
                branches.remove(chosen)
            case _ if len(chosen) < 65:
                cache.extend(chosen, text(rng.randint(1, 5), seed=1000 + step))
        with torch.inference_mode():
            starts = [min(cache.computed_length(branch), len(branch) - 1) for branch in branches]
            chunks = [Chunk(branch, start, len(branch), [0]) for branch, start in zip(branches, starts, strict=True)]
            result = runner.forward(chunks)
        i = rng.randrange(len(branches))
        expected = logits_alone(reference, cache.tokens(branches[i]))[-1]
        torch.testing.assert_close(torch.from_numpy(result.logits[result.rows[i][0]]), expected, atol=1e-3, rtol=1e-4)
    assert reused
    assert evicted
    runner.close()


@pytest.mark.parametrize("method", ["auto", "seed", "jacobi"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt_oss"])
def test_lossless_methods_give_the_same_tokens(
    known: Callable[..., Any], tokenizer: Any, family: str, method: str
) -> None:
    """Prompts are longer than the windows, and are shared by several samples."""
    request = Request(prompt="the rain in the " * 5, sampling=Sampling(max_tokens=24, n=3, temperature=0.8, seed=1))
    tokens = []
    for name in ("ar", method):
        with load_decoder(name, known(family), tokenizer=tokenizer, kv_budget=2000) as decoder:
            assert isinstance(decoder.engine.runner.backend, NativeForward)
            tokens.append([done.tokens for done in decoder.generate([request])])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("gpt_oss", {"swiglu_limit": 5.0}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("llama", {"head_dim": 12}),
        ("llama", {"hidden_size": 40}),
        ("llama", {"intermediate_size": 50}),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 1}),
    ],
)
def test_unsupported_models_run_in_transformers(
    text: Callable[..., Any],
    computed: Callable[..., Any],
    known: Callable[..., Any],
    logits_alone: Callable[..., Tensor],
    family: str,
    changes: dict[str, Any],
) -> None:
    model = known(family, **changes)
    reference, runner = copy.deepcopy(model), Runner(LoadedModel.of(model), 300)
    assert isinstance(runner.backend, TransformersForward)
    torch.testing.assert_close(
        computed(runner, [text(20)])[0][0], logits_alone(reference, text(20))[-1], atol=1e-3, rtol=1e-4
    )
    runner.close()


def test_layers_with_a_custom_forward_run_in_transformers(known: Callable[..., Any]) -> None:
    class Adapted(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + 1

    model = known()
    layer = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Adapted(layer.in_features, layer.out_features, bias=False)
    runner = Runner(LoadedModel.of(model), 100)
    assert isinstance(runner.backend, TransformersForward)
    runner.close()


def test_if_memory_is_short_the_weights_stay_unpacked_with_one_warning(
    known: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.log_once.cache_clear()
    model = known()
    numbers = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    for spare, packed in ((2 * 4 * numbers, True), (2 * 4 * numbers - 1, False), (1000, False), (1000, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=spare: SimpleNamespace(available=free))
        assert (native_forward(LoadedModel.of(model)) is not None) == packed
    assert caplog.messages == [
        "decoding is slower, as packing the weights for the forward in C needs 0.0 GiB, and 0.0 are free: free "
        "memory to decode faster"
    ]
    with pytest.raises(OptionError, match="memory for the packed weights"):
        open_backend(LoadedModel.of(model), "int8-dynamic")
