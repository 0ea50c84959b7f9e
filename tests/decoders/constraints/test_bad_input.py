"""Constraints that cannot be used are refused at once, with their value and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLParserLimits
from pydantic import BaseModel, ValidationError

from tot.decoders import Constraint, Request, RequestError, Sampling
from tot.decoders.engine import grammar

UNFAIR: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, r'the constraint \{"regex":"\(a"\} cannot be used: .*unclosed group.*: correct it'),
    ({"regex": "(?=a)b"}, "look-around.* is not supported"),
    ({"regex": "[^\\s\\S]"}, "no text meets it: correct it"),
    ({"regex": "(a?){5000}a{5000}"}, "too many expressions constructed: simplify it"),
    ({"regex": "(" * 3000 + ")" * 3000}, "correct it"),
    ({"lark": "hello world"}, "Expected token ':'"),
    ({"lark": "start: other"}, 'unknown name: "other"'),
    ({"lark": "start: start"}, "no text meets it: correct it"),
    ({"lark": 'start: "a" start'}, r"Too many items .*: simplify it"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable schema"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]'),
    ({"json_schema": {"type": "unknown"}}, "Invalid type: unknown"),
    ({"json_schema": {"$ref": "https://example.com/x.json"}}, "does not fetch"),
    ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ({"choices": tuple(f"choice {i}" for i in range(200_000))}, "characters, and the limit is 1,048,576: simplify it"),
]
INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "a constraint is one of choices, regex, json_schema, lark, not none"),
    ({"regex": "a", "lark": "start: A"}, "not regex and lark"),
    ({"choices": ()}, "at least 1 item"),
    ({"choices": ("",)}, "at least 1 character"),
    ({"regex": ""}, "at least 1 character"),
    ({"regex": "a\ud800"}, "unicode"),
    ({"json_schema": {"const": "a\ud800"}}, "lone surrogate"),
    ({"json_schema": 3}, "3 has no JSON schema"),
    ({"json_schema": {"const": object()}}, "valid JSON"),
    ({"pattern": "a"}, "Extra inputs"),
]


@pytest.mark.parametrize(("given", "message"), UNFAIR)
def test_a_constraint_that_cannot_be_used_is_refused(make: Any, given: dict[str, Any], message: str) -> None:
    decoder = make("ar")
    request = Request(prompt="abc", constraint=Constraint(**given), sampling=Sampling(max_tokens=5))
    with pytest.raises(RequestError, match=message) as error:
        decoder.submit([request])
    assert len(str(error.value)) < 450
    free = Request(prompt="abc", sampling=Sampling(max_tokens=5))
    assert len(decoder.generate([free])[0].tokens) > 0


@pytest.mark.parametrize(("given", "message"), INVALID)
def test_an_invalid_constraint_is_no_value(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Constraint(**given)


@pytest.mark.parametrize(
    "conflict", [{"choices": ("a",)}, {"sampling": Sampling(keep_stop=True)}, {"sampling": Sampling(ignore_eos=True)}]
)
def test_fields_that_end_a_text_otherwise_are_refused(conflict: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match="does not go with a constraint or tools, which say how the text ends: leave it out"
    ):
        Request(prompt="abc", constraint=Constraint(regex="a"), **conflict)


def test_a_grammar_that_becomes_too_complex_fails_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(step_max_items=50, verbose_errors=False))
    ambiguous = Constraint(lark='start: a\na: "t" | "h" | a a | "(" a ")"')
    free = Request(prompt="abc", sampling=Sampling(max_tokens=60, temperature=1.0, ignore_eos=True))
    bad = Request(prompt="abc", constraint=ambiguous, sampling=Sampling(max_tokens=60, temperature=1.0, n=9))
    decoder = make("ar")
    expected = decoder.generate([free])
    first, second = decoder.submit([free, bad])
    assert [one.tokens for one in first.result()] == [one.tokens for one in expected]
    with pytest.raises(RequestError, match=r"the constraint .* cannot be used: .*Too many items .*: simplify it"):
        second.result()
    assert decoder.generate([free])[0].tokens == expected[0].tokens


class Node(BaseModel):
    value: int
    next: Node | None


def test_types_and_schemas_that_refer_to_themselves(make: Any) -> None:
    decoder = make("ar")
    types: list[Any] = [Node, int, bool, list[int], dict, dict[str, int], tuple[int, str], int | None]
    for kind in types:
        schema = Constraint(json_schema=kind)
        assert Constraint.model_validate_json(schema.model_dump_json()) == schema
        (completion,) = decoder.generate(
            [Request(prompt="abc", constraint=schema, sampling=Sampling(max_tokens=20, temperature=1.0))]
        )
        assert completion.finish_reason in ("eos", "length")


def test_a_grammar_is_compiled_once(make: Any) -> None:
    decoder = make("ar")
    request = Request(prompt="abc", constraint=Constraint(choices=("the", "an")), sampling=Sampling(n=3))
    decoder.generate([request, request])
    info = decoder.engine.grammars._compiled.cache_info()
    assert (info.misses, info.hits) == (1, 1)
    assert len(decoder.engine.grammars.matcher(request.constraint).mask) == 10  # 300 rows of logits
