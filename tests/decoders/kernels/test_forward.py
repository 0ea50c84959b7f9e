"""The forward in C, with floats and with 8-bit integers, against the transformers model, for each family."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from tot.decoders import OptionError, Request, Sampling, load_decoder, machine
from tot.decoders.kernels.backend import open_backend
from tot.decoders.kernels.module import TransformersForward
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.forward import NativeForward, native_forward
from tot.decoders.kernels.native.packing import quantized
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import LoadedModel


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rounded", [False, True])
def test_the_native_forward_gives_the_models_logits(lab: Any, family: str, rounded: bool) -> None:
    model = lab.known(family)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    reference, runner = copy.deepcopy(model), lab.open(model, 6000)
    assert runner.backend.weights == ("bfloat16" if rounded else "float32")
    for count in (1, 3, 5, 12, 26):
        lab.check(runner, reference, lab.texts(count))


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
def test_rotary_embeddings_equal_the_models_at_any_position(lab: Any, rope: dict[str, Any]) -> None:
    model = lab.known(rope_parameters={"rope_theta": 10_000.0, **rope}, max_position_embeddings=4096)
    reference, runner = copy.deepcopy(model), lab.open(model, 4000)
    for length in (30, 1100, 700, 2300):  # more positions than are computed at once, then fewer again
        lab.check(runner, reference, [lab.text(length, seed=length)], atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite"])
def test_in_bfloat16_it_is_at_least_as_accurate_as_the_model(lab: Any, family: str) -> None:
    model = lab.halved(family)
    truth, plain, runner = copy.deepcopy(model).float(), copy.deepcopy(model), lab.open(model, 6000)
    assert runner.backend.weights == "bfloat16"
    ours, theirs = [], []
    for count in (1, 2, 5, 12, 13, 26):
        texts = lab.texts(count)
        for (logits, expected), tokens in zip(lab.both(runner, truth, texts), texts, strict=True):
            ours.append(logits - expected)
            theirs.append(lab.alone(plain, tokens)[-1] - expected)
            assert torch.corrcoef(torch.stack([logits, expected]))[0, 1] > 0.99
    assert torch.stack(ours).square().mean() < torch.stack(theirs).square().mean()


def rounded_like_a_file(lab: Any, weight: Tensor) -> nn.Parameter:
    """Round a weight to eight bits, with scales and minimums of 16 bits."""
    matrix = quantized(weight.numpy())
    unit = np.float32(2**10)
    scales, minimums = ((part * unit).astype(np.float16) / unit for part in (matrix.scales, matrix.minimums))
    return nn.Parameter(torch.from_numpy(lab.floats(replace(matrix, scales=scales, minimums=minimums))))


def furthest(lab: Any, family: str, integers: bool) -> float:
    """Return the largest error of the forward in C, relative to the spread of the logits."""
    model = lab.known(family)
    reference, runner = copy.deepcopy(model), lab.open(lab.integers(model) if integers else model)
    for layer in reference.modules() if integers else ():
        if isinstance(layer, nn.Linear | nn.Embedding):
            layer.weight = rounded_like_a_file(lab, layer.weight.data)
        if isinstance(layer, nn.Linear):
            layer.__class__ = lab.rounding
    found = []
    for count in (1, 3, 8, 13):
        for logits, expected in lab.both(runner, reference, lab.texts(count)):
            assert expected.std() > 0.5
            found.append(float((logits - expected).pow(2).mean().sqrt() / expected.std()))
    return max(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_of_eight_bits_give_logits_close_to_the_rounded_weights(lab: Any, family: str) -> None:
    near_tie = family == "gpt_oss"  # its router chooses another expert
    assert furthest(lab, family, integers=True) < (0.3 if near_tie else 0.1)


@pytest.mark.families
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("integers", "bound"), [(False, 1e-4), (True, 0.3)])
def test_vectors_of_every_length_give_close_logits(
    vectors: None, lab: Any, family: str, integers: bool, bound: float
) -> None:
    assert furthest(lab, family, integers) < bound


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("integers", [False, True])
def test_neither_other_rows_nor_threads_change_a_bit(lab: Any, family: str, integers: bool) -> None:
    """26 rows are divided into other blocks than one row; in a mixture, the others also choose among its experts."""
    model = lab.known(family)
    runner = lab.open(lab.integers(model) if integers else model)
    texts = [[i] for i in range(26)]  # no context, so that attention is not a sum
    for tokens, logits in zip(texts, lab.computed(runner, texts), strict=True):
        for company in (0, 1, 4, 6):
            beside = [[100 + i] for i in range(company)]
            assert torch.equal(lab.computed(runner, [tokens, *beside])[0], logits)
    longer, results = [lab.text(40, seed=i) for i in range(7)], []
    try:
        for threads in (1, 2, 3, 7, 100):
            machine.use_threads(threads)
            results.append(torch.cat(lab.computed(runner, longer, reads=3)))
    finally:
        machine.use_threads(None)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("method", ["auto", "seed", "jacobi"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt_oss"])
def test_lossless_methods_give_the_same_tokens(lab: Any, tokenizer: Any, family: str, method: str) -> None:
    """Prompts are longer than the windows, and are shared by several samples."""
    request = Request(prompt="the rain in the " * 5, sampling=Sampling(max_tokens=24, n=3, temperature=0.8, seed=1))
    tokens = []
    for name in ("ar", method):
        with load_decoder(name, lab.known(family), tokenizer=tokenizer, kv_budget=2000) as decoder:
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
def test_unsupported_models_run_in_transformers(lab: Any, family: str, changes: dict[str, Any]) -> None:
    model = lab.known(family, **changes)
    reference, runner = copy.deepcopy(model), lab.open(model, 300, backend=TransformersForward)
    lab.check(runner, reference, [lab.text(20)])


def test_layers_with_a_custom_forward_run_in_transformers(lab: Any) -> None:
    class Adapted(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + 1

    model = lab.known()
    layer = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Adapted(layer.in_features, layer.out_features, bias=False)
    lab.open(model, 100, backend=TransformersForward)


def test_if_memory_is_short_the_weights_stay_unpacked_with_one_warning(
    lab: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.log_once.cache_clear()
    model = lab.known()
    numbers = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    for spare, packed in ((2 * 4 * numbers, True), (2 * 4 * numbers - 1, False), (1000, False), (1000, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=spare: SimpleNamespace(available=free))
        assert (native_forward(LoadedModel.of(model)) is not None) == packed
    assert caplog.messages == [
        "decoding is slower, as packing the weights for the forward in C needs 0.0 GiB, and 0.0 are free: free "
        "memory to decode faster"
    ]


def test_integers_that_the_backend_in_c_cannot_compute_are_refused(lab: Any) -> None:
    with pytest.raises(OptionError, match="quantize=gguf needs a model of the families llama, mistral"):
        open_backend(lab.integers(lab.known(hidden_act="gelu")))
