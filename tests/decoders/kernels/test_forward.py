"""The native forward in C against the transformers model, for each supported family."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from tot.decoders import OptionError, Request, Sampling, load_decoder, machine
from tot.decoders.kernels.backend import open_backend
from tot.decoders.kernels.module import TransformersForward
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.forward import NativeForward, native_forward
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
    for count in (1, 2, 3, 4, 5, 7, 12, 13, 26):
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


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("quantize", [None, "int8-dynamic"])
def test_a_row_does_not_depend_on_the_number_of_rows(lab: Any, family: str, quantize: Any) -> None:
    """Results are bit-identical, although 26 rows are divided into other blocks than one row.

    In a mixture, the rows beside a row also choose among its experts."""
    runner = lab.open(lab.known(family), quantize=quantize)
    texts = [[i] for i in range(26)]  # no context, so that attention is not a sum
    for tokens, logits in zip(texts, lab.computed(runner, texts), strict=True):
        for company in (0, 1, 4, 6):
            beside = [[100 + i] for i in range(company)]
            assert torch.equal(lab.computed(runner, [tokens, *beside])[0], logits)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("quantize", [None, "int8-dynamic"])
def test_threads_change_no_bit(lab: Any, family: str, quantize: Any) -> None:
    runner = lab.open(lab.known(family), quantize=quantize)
    texts = [lab.text(40, seed=i) for i in range(7)]
    results = []
    try:
        for threads in (1, 2, 3, 7, 100):
            machine.use_threads(threads)
            results.append(torch.cat(lab.computed(runner, texts, reads=3)))
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
    with pytest.raises(OptionError, match="memory for the packed weights"):
        open_backend(LoadedModel.of(model), "int8-dynamic")
