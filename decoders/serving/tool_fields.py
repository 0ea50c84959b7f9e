"""Fields of requests about tools and formats, in the forms of Chat Completions and of Responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from tot.decoders.constraint import Constraint
from tot.decoders.request import ToolCall


def called(given: Any) -> Any:
    """Read the calls of a message. Raises ValueError."""
    if not isinstance(given, list):
        return given
    calls = []
    for one in given:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or one.get("type", "function") != "function":
            raise ValueError('a call must be {"id": "...", "type": "function", "function": {...}}')
        about = {name: function.get(name) for name in ("name", "arguments")} | {"id": one.get("id")}
        if wrong := next((name for name, value in about.items() if not isinstance(value, str)), None):
            raise ValueError(f"the {wrong} of a call is not text")
        calls.append(ToolCall(**about))
        calls[-1].check()
    return calls


def functions(given: Any) -> Any:
    """Read tools in the form of Chat Completions or of Responses."""
    if not isinstance(given, list):
        return given
    found = []
    for one in given:
        if not isinstance(one, dict) or one.get("type", "function") != "function":
            kind = str(one.get("type"))[:40] if isinstance(one, dict) else type(one).__name__
            raise ValueError(f"a tool has type {kind!r}, and only functions are supported: remove it")
        about = one.get("function", one)
        ignored = ("type", "strict", "defer_loading", "cache_control")
        fields = about.items() if isinstance(about, dict) else [("function", about)]
        found.append({name: value for name, value in fields if value is not None and name not in ignored})
    return found


def choice(given: Any) -> Any:
    """Read a choice of tools: none, auto, required, or an object that names a function."""
    if isinstance(given, dict) and given.get("type") == "function":
        return given.get("function", given).get("name") if isinstance(given.get("function", given), dict) else None
    if given not in ("none", "auto", "required"):
        raise ValueError('give "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}')
    return given


def _form(given: Any) -> Any:
    """Read the format of a reply as a constraint."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    about = given.get("json_schema", given) if kind == "json_schema" else None
    if not isinstance(about, dict) or not isinstance(about.get("schema"), dict):
        raise ValueError('the type is "text", "json_object" or "json_schema", which has a "schema"')
    return {"json_schema": about["schema"]}


Form = Annotated[Constraint | None, BeforeValidator(_form)]
