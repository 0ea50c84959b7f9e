"""Check replies against the constraint and the tools of a request, which a server may not enforce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema_rs
from pydantic_core import from_json

from tot.decoders.constraint import Constraint
from tot.decoders.errors import RequestError
from tot.decoders.request import Completion, Request
from tot.decoders.tools import TAGGED, arguments_schema


class OutputCheck:
    """The constraint and the tools of a request, compiled."""

    def __init__(self, request: Request, constraint: Constraint | None) -> None:
        """`constraint`: the request's, unless the server enforces it. Raises RequestError if a schema is invalid."""
        self._request = request
        self._constraint = constraint
        named = request.tool_choice not in ("auto", "required")
        tools = [tool for tool in request.tools if not named or tool.name == request.tool_choice]
        self._several = request.parallel_tool_calls and not named
        try:
            self._arguments = {tool.name: _compiled(arguments_schema(tool)) for tool in tools}
            self._schema = None
            if constraint is not None and constraint.json_schema is not None:
                self._schema = _compiled(dict(constraint.json_schema))
            elif constraint is not None:
                constraint.allows("")
        except ValueError as error:
            reason = str(error).partition("\n")[0][:200]
            raise RequestError(f"a schema or a constraint is invalid ({reason}): correct it") from None

    def valid(self, sample: Completion) -> Completion:
        """Return a sample without blanks and a code fence around its answer. A sample that was cut is not checked.

        Raises ValueError if its text or its calls violate the constraint or the schemas of the tools.
        """
        if sample.finish_reason != "eos":
            return sample
        answer, bare = sample.answer, sample.answer.strip()
        if (self._request.tools and self._has_calls(answer)) or self._constraint is None:
            return sample
        for text in (answer, bare, _unfenced(bare)):
            if self._allows(text):
                parts = (*sample.parts[:-1], replace(sample.parts[-1], text=text))
                return replace(sample, text=sample.text.removesuffix(answer) + text, parts=parts)
        raise ValueError(f"the text is not of the form {self._constraint.kind}")

    def _has_calls(self, text: str) -> bool:
        content, calls = TAGGED.split(text)
        if TAGGED.trigger in content:
            raise ValueError("a call is malformed")
        if len(calls) > 1 and not self._several:
            raise ValueError(f"it has {len(calls)} calls, and the request allows one")
        if not calls and self._request.tool_choice != "auto":
            raise ValueError(f"it has no call, and tool_choice is {self._request.tool_choice}")
        for call in calls:
            call.check()
            if call.name not in self._arguments:
                raise ValueError(f"it calls {call.name[:64]!r}, and the request allows {', '.join(self._arguments)}")
            for error in self._arguments[call.name].iter_errors(from_json(call.arguments)):
                raise ValueError(f"the arguments of {call.name} are invalid: {error.message[:100]}")
        return bool(calls)

    def _allows(self, text: str) -> bool:
        if self._schema is None:
            return self._constraint is not None and self._constraint.allows(text)
        try:
            return self._schema.is_valid(from_json(text, allow_inf_nan=False))
        except ValueError:
            return False


def _compiled(schema: dict[str, Any]) -> jsonschema_rs.Validator:
    def retrieve(address: str) -> Any:
        raise ValueError(f"{address} is not in the schema")

    return jsonschema_rs.validator_for(schema, retriever=retrieve)


def _unfenced(text: str) -> str:
    """Return the text in a code fence."""
    return text.partition("\n")[2][:-3].strip() if text.startswith("```") and text.endswith("```") else text
