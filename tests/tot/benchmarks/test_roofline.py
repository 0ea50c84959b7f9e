"""Roofline: the machine's limits, and the smallest time of a step."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.roofline import Demand, limit, matrix_rate, read_bandwidth
from tot.decoders.models.loaded import LoadedModel


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    assert limit(100.0, 10.0, bandwidth=50.0, rate=100.0) == 2.0
    assert limit(100.0, 1000.0, bandwidth=50.0, rate=100.0) == 10.0


def test_rates_come_from_the_fastest_run_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each run takes the next interval of the clock; the first, of a second, is a warm-up.
    times = iter([0, 1, *(t for lap in (4, 3, 2, 5, 6) for t in (10, 10 + lap))] * 2)
    monkeypatch.setattr("benchmarks.roofline.time.perf_counter", lambda: next(times))
    assert read_bandwidth(size=800) == 400.0
    assert matrix_rate("float32", size=4) == 2 * 4**3 / 2


def test_a_step_reads_all_linear_weights_and_multiplies_them_by_every_row() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    embeddings = model.model.embed_tokens.weight.numel()
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    weights = sum(weight.numel() for weight in model.parameters()) - norms - embeddings
    demand = Demand.of(LoadedModel.of(model), 2)
    assert demand.weight_bytes == 2 * weights
    assert demand.operations(3, 0) == 3 * 2 * weights
    # Scores and weighted sum of a row: 2 products of 32 numbers with each key, in 2 layers.
    assert demand.operations(3, 10) - demand.operations(3, 0) == 3 * 10 * 2 * (2 * 2 * 32)
