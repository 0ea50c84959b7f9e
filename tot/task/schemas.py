"""Schema: the type of a template's texts, as a constraint on the model and as a parser of its texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from tot.decoders.constraint import Constraint


class Schema:
    """The texts of a template: JSON of a type, or texts of a constraint."""

    def __init__(self, given: Any) -> None:
        """`given`: a Constraint, or a type that pydantic describes. Raises ValueError or TypeError if it is neither.

        A literal of texts is written without quotation marks.
        """
        self._adapter: TypeAdapter[Any] | None = None
        if isinstance(given, Constraint):
            self.constraint = given
            given.allows("")  # raises if it is invalid
            return
        self._adapter = TypeAdapter(given)
        self.constraint = Constraint(json_schema=given)
        schema: Mapping[str, Any] = self.constraint.json_schema or {}
        names = schema.get("enum") or [schema.get("const")]
        if all(isinstance(name, str) and name for name in names):
            self.constraint = Constraint(choices=names)

    def parse(self, text: str) -> Any | None:
        """Return the object that a text stands for, or the text for a constraint without JSON. None if it is invalid.

        JSON may be in a code fence. A text that is not JSON may be the object itself: yes, 2026-01-31.
        """
        text = text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text.partition("\n")[2][:-3].strip()
        if self._adapter is None:
            allowed = any(self.constraint.allows(one) for one in (text, f" {text}"))
            with suppress(ValueError):  # too deep
                return (text if self.constraint.json_schema is None else from_json(text)) if allowed else None
            return None
        with suppress(ValidationError):
            return self._adapter.validate_json(text)
        if not text.startswith(('"', "{", "[")):
            with suppress(ValidationError):
                return self._adapter.validate_python(text)
        return None

    def restore(self, saved: Any) -> Any:
        """Return the object for saved JSON data, and other data as it is."""
        if self._adapter is not None:
            with suppress(ValidationError):
                return self._adapter.validate_json(json.dumps(saved), strict=True)
        return saved
