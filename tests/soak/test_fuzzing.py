"""10,000 bodies of the schema of the server's own request models, valid and not: none makes it fail."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic.json_schema import models_json_schema
from transformers.utils import logging

from tot.decoders.serving.metrics import ROUTES
from tot.decoders.serving.protocol import ChatBody, TextBody
from tot.serving.chat import SearchBody
from tot.serving.responses import ResponsesBody

BODIES = 10_000
GETS = {"/v1/models", "/v1/models/{name}", "/health", "/metrics", "/live/{token}/"}
STATUSES = {200, 204, 400, 404, 405, 415}


def schema_of(posts: dict[str, type[Any]], models: list[str], token: str) -> dict[str, Any]:
    """Return an OpenAPI schema with these bodies by path, and all routes without a body."""
    schemas, shared = models_json_schema(
        [(kind, "validation") for kind in posts.values()], ref_template="#/components/schemas/{model}"
    )
    for kind in posts.values():
        shared["$defs"][kind.__name__]["properties"]["model"] = {"enum": models}
    done = {"200": {"description": "done"}}
    values = {"token": [token, "x"], "name": [*models, "x"], "run": ["x"]}
    paths: dict[str, Any] = {path: {"get": {"responses": done}} for path in GETS}
    paths["/live/{token}/runs/{run}/stop"] = {"post": {"responses": done}}
    for path, kind in posts.items():
        content = {"application/json": {"schema": schemas[kind, "validation"]}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": done}}
    for path, operations in paths.items():
        operations["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"enum": values[name]}}
            for name in re.findall(r"{(\w+)}", path)
        ]
    info = {"title": "tot serve", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": shared["$defs"]}}


def send(operation: Any, mode: Any, examples: int, url: str, statuses: Counter[int]) -> None:
    """Send examples of an operation, and check and count the replies."""
    schemas = operation.schema.raw_schema["components"]["schemas"].values()
    fields = {name for one in schemas for name in one.get("properties", ())}

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        reply = case.call(base_url=url, timeout=60)
        statuses[reply.status_code] += 1
        check(case, reply, fields)

    one()


def check(case: Any, reply: Any, fields: set[str]) -> None:
    """Check that a reply is no failure, and that a refusal is a JSON error that names the field."""
    about = case.as_curl_command(), reply.text[:500]
    assert reply.status_code in STATUSES, about
    assert "internal_error" not in reply.text, about
    assert "model_error" not in reply.text, about
    if reply.status_code < 400 or case.method == "HEAD":
        return
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, about
    if reply.status_code == 400 and error["code"] != "invalid_json" and isinstance(case.body, dict):
        named = fields | {" ".join(str(name).split())[:30] for name in case.body}
        assert error["param"] is not None or any(name in error["message"] for name in named), about


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_body_makes_the_server_fail(tiny: Any, serve: Any, tmp_path: Path, report: Any) -> None:
    folder = tmp_path / "tiny"
    with tiny() as decoder:
        pass  # restores the model's own attention
    logging.disable_progress_bar()
    decoder.model.save_pretrained(folder)
    logging.enable_progress_bar()
    decoder.tokenizer.save_pretrained(folder)
    server = serve(str(folder), "--max-tokens-limit", "4", "--kv-budget", "8000")
    token = re.findall(r"/live/([^/]+)/", server.log)[0]
    decoders = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}
    searches = {"/v1/chat/completions": SearchBody, "/v1/responses": ResponsesBody}
    schemas = [
        schema_of(decoders, ["tiny", "tiny:ar", "tiny:seed", "tiny:pdos"], token),
        schema_of(searches, ["tiny:vote", "tiny:tree", "tiny:exact"], token),
    ]
    assert set(ROUTES) <= {path for schema in schemas for path in schema["paths"]}
    statuses, bodies = Counter[int](), 0
    for schema in schemas:
        for found in schemathesis.openapi.from_dict(schema).get_all_operations():
            operation = found.ok()
            examples = BODIES // 8 if operation.body else 25
            for mode in schemathesis.GenerationMode:
                if mode is schemathesis.GenerationMode.POSITIVE or operation.body or operation.path_parameters:
                    send(operation, mode, examples, server.url, statuses)
                    bodies += examples if operation.body else 0
    report(f"{bodies} bodies, statuses {dict(statuses)}")
    assert bodies == BODIES
    assert statuses[200] > BODIES // 50
    assert statuses[400] > BODIES // 4
    fine = server.post("/v1/completions", model="tiny", prompt="Hm.", max_tokens=2)
    assert fine.status_code == 200
    assert json.loads(fine.text)["choices"]
    server.check_idle()
