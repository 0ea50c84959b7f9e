"""From a constraint to the request fields of a server that has it."""

from __future__ import annotations

import json
import re
from typing import Any

from tot.decoders.constraint import Constraint
from tot.decoders.errors import RequestError
from tot.decoders.remote.body import Prompt, messages_of
from tot.decoders.remote.servers import SERVERS, Server

_VLLM = {"json_schema": "json", "choices": "choice", "regex": "regex", "lark": "grammar"}


def constraint_fields(constraint: Constraint | None, prompt: Prompt, server: Server) -> dict[str, Any]:
    """Return the fields of a request with a constraint. Raises RequestError if the server is not known to have it."""
    if constraint is None:
        return {}
    kind, name = constraint.kind, next(name for name, one in SERVERS.items() if one is server)
    value = constraint.model_dump(mode="json")[kind]
    if name == "tot":
        return {"constraint": {kind: value}}
    if name == "vllm":
        return {"structured_outputs": {_VLLM[kind]: value}}
    if name == "sglang" and kind in ("choices", "regex"):
        return {"regex": value if kind == "regex" else "|".join(map(re.escape, value))}
    if name == "llama-server" and kind == "json_schema":
        return {"json_schema": value}
    if name == "llama-server" and kind == "choices":
        return {"grammar": "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)}
    if kind != "json_schema":
        raise RequestError(f"{server.title} has no constraint of the kind {kind}: use json_schema, vLLM or tot serve")
    if not messages_of(prompt):
        raise RequestError(f"{server.title} has JSON schemas in chats only: give the prompt as messages")
    return {"response_format": {"type": kind, kind: {"name": "answer", "schema": value, "strict": True}}}
