"""Random JSON schemas, and the parts of a test of constrained texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"', "é"])


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], optional: int) -> dict[str, Any]:
        required = list(properties)[: len(properties) - optional % (len(properties) + 1)]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(NAMES, values, max_size=3), st.integers(0, 3))


@pytest.fixture(scope="session")
def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Small schemas of objects, arrays, enums, strings, numbers and unions."""
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "string"}]),
        st.builds(
            lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-99, 99), st.integers(0, 999)
        ),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
        st.builds(lambda n: {"type": "string", "pattern": f"^[a-c]{{1,{n}}}$"}, st.integers(1, 5)),
        st.builds(
            lambda v: {"enum": v}, st.lists(st.one_of(NAMES, st.integers(0, 99), st.none()), min_size=1, max_size=4)
        ),
        st.builds(lambda v: {"const": v}, NAMES),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _objects(inner),
            st.builds(
                lambda one, low, more: {"type": "array", "items": one, "minItems": low, "maxItems": low + more},
                *(inner, st.integers(0, 2), st.integers(0, 2)),
            ),
            st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=6,
    )
