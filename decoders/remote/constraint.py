"""From a constraint and tools to the request fields of a server."""

from __future__ import annotations

import json
import re
from typing import Any

from tot.decoders.errors import RequestError
from tot.decoders.remote.body import messages_of
from tot.decoders.remote.servers import SERVERS, Server
from tot.decoders.request import Request
from tot.decoders.tools import as_json

_VLLM = {"json_schema": "json", "choices": "choice", "regex": "regex", "lark": "grammar"}


def tool_fields(request: Request) -> dict[str, Any]:
    """Return the fields of a request with tools."""
    if not request.tools:
        return {}
    named = request.tool_choice not in ("auto", "required")
    choice = {"type": "function", "function": {"name": request.tool_choice}} if named else request.tool_choice
    fields: dict[str, Any] = {"tools": [as_json(tool) for tool in request.tools], "tool_choice": choice}
    return fields if request.parallel_tool_calls else {**fields, "parallel_tool_calls": False}


def constraint_fields(request: Request, server: Server) -> dict[str, Any]:
    """Return the fields of a request with a constraint. Raises RequestError if the server is not known to have it."""
    if (constraint := request.constraint) is None or (request.tools and request.tool_choice != "auto"):
        return {}
    kind, name = constraint.kind, next(name for name, one in SERVERS.items() if one is server)
    value = constraint.model_dump(mode="json")[kind]
    instead = "or set output_retries, so that replies are checked"
    if name == "tot":
        return {"constraint": {kind: value}}
    if request.tools and name != "openai":
        raise RequestError(f"{server.title} has no constraint beside tools: leave one out, use tot serve, {instead}")
    if name == "vllm":
        return {"structured_outputs": {_VLLM[kind]: value}}
    if name == "sglang" and kind in ("choices", "regex"):
        return {"regex": value if kind == "regex" else "|".join(map(re.escape, value))}
    if name == "llama-server" and kind == "json_schema":
        return {"json_schema": value}
    if name == "llama-server" and kind == "choices":
        return {"grammar": "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)}
    if kind != "json_schema":
        others = f"use json_schema, vLLM or tot serve, {instead}"
        raise RequestError(f"{server.title} has no constraint of the kind {kind}: {others}")
    if not messages_of(request.prompt):
        raise RequestError(f"{server.title} has JSON schemas in chats only: give the prompt as messages, {instead}")
    return {"response_format": {"type": kind, kind: {"name": "answer", "schema": value, "strict": True}}}
