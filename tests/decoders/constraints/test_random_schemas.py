"""Texts of random schemas are JSON that the schema allows, or end for their length."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tot.decoders import Completion, Constraint, Request, Sampling, load_decoder

BATCH = 25


def requests(schemas: list[dict[str, Any]], prompt: str, max_tokens: int) -> list[Request]:
    return [
        Request(
            prompt=prompt,
            constraint=Constraint(json_schema=schema),
            sampling=Sampling(max_tokens=max_tokens, temperature=1.0, seed=i),
        )
        for i, schema in enumerate(schemas)
    ]


def check(schema: dict[str, Any], completion: Completion) -> None:
    assert completion.usage.forced_tokens + completion.usage.masked_tokens == completion.usage.new_tokens
    if completion.finish_reason in ("length", "repetition"):
        return
    assert completion.finish_reason == "eos"
    value = json.loads(completion.text)
    jsonschema.validate(value, schema)
    assert completion.text.count("\n") == 0


def check_batches(decoder: Any, schemas: st.SearchStrategy[Any], batches: int, prompt: str, tokens: int) -> float:
    """Decode random schemas, and return the share of texts that did not end for their length."""
    done: list[bool] = []

    @settings(max_examples=batches, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
    @given(st.lists(schemas, min_size=BATCH, max_size=BATCH))
    def run(some: list[dict[str, Any]]) -> None:
        for schema, completion in zip(some, decoder.generate(requests(some, prompt, tokens)), strict=True):
            check(schema, completion)
            done.append(completion.finish_reason == "eos")

    run()
    return sum(done) / len(done)


def test_texts_of_500_schemas_are_valid(make: Any, schemas: st.SearchStrategy[Any]) -> None:
    assert check_batches(make("ar"), schemas, 20, "abc", 60) > 0.5


@pytest.mark.real
@pytest.mark.parametrize("batches", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_texts_of_the_embedded_model_are_valid(smollm2: str, schemas: st.SearchStrategy[Any], batches: int) -> None:
    with load_decoder("ar", smollm2) as decoder:
        assert check_batches(decoder, schemas, batches, "An example of JSON:\n", 40) > 0.5
