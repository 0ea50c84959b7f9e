"""Constraint: which texts a request allows as its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PydanticUserError,
    TypeAdapter,
    model_validator,
)


def _schema_of(given: Any) -> Any:
    """Return the JSON schema of a type, such as a pydantic model, `list[int]` or `dict`; a mapping stays."""
    if given is None or isinstance(given, Mapping):
        return given
    try:
        return _closed(TypeAdapter(given).json_schema())
    except (PydanticUserError, TypeError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{given!r} has no JSON schema ({reason}): give a mapping, or a type of pydantic") from None


def _closed(schema: Any) -> Any:
    """Return a JSON schema whose objects have no other properties, unless it says more about these."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **closed} if "properties" in schema and "type" in schema else closed


class Constraint(BaseModel):
    """The texts that an answer may be: exactly one of the fields is set.

    The model draws only tokens with which the answer can still become such a text, and may end it only where it is one.
    It applies after the model's thinking or the request's `answer_trigger`, otherwise from the start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Whole answers, of which the model writes one. A prompt that ends without a blank may need choices with one."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that the whole answer matches, in the syntax of Rust's `regex`, without look-around and
    back-references."""
    json_schema: Annotated[Mapping[str, JsonValue] | None, BeforeValidator(_schema_of)] = None
    """A JSON schema, or a type that pydantic describes by one: a model class, `list[int]`, or `dict` for any object.
    The answer is JSON on one line in this form: {"a": 1, "b": [1, 2]}. Properties come in the schema's order. The
    objects of a type have no other properties, unless it allows them."""
    lark: Annotated[str, Field(min_length=1)] | None = None
    """A context-free grammar in llguidance's variant of Lark, whose first rule is `start`."""

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return " and ".join(name for name in type(self).model_fields if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one(self) -> Constraint:
        if self.kind not in (names := type(self).model_fields):
            raise ValueError(f"a constraint is one of {', '.join(names)}, not {self.kind or 'none'}")
        try:
            self.model_dump_json()
        except ValueError:
            raise ValueError("the constraint is not valid Unicode: it has a lone surrogate") from None
        return self

    def allows(self, text: str) -> bool:
        """Return whether a text meets the constraint. Raises ValueError if the constraint is invalid."""
        if self.choices is not None:
            return text in self.choices
        from llguidance import LLMatcher, LLTokenizer

        if self.json_schema is not None:
            grammar = LLMatcher.grammar_from_json_schema(dict(self.json_schema))
        elif self.regex is not None:
            grammar = LLMatcher.grammar_from_regex(self.regex)
        else:
            grammar = LLMatcher.grammar_from_lark(self.lark or "")
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().split())[:200])
        return matcher.consume_tokens([*text.encode("utf-8", "replace")]) and matcher.is_accepting()
