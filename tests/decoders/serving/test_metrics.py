"""`/metrics` reports requests, tokens and slots in Prometheus's format, and `/health` whether the engine works."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
from prometheus_client.parser import text_string_to_metric_families


def test_requests_tokens_and_slots_are_counted(server: Any, client: openai.OpenAI, says: Any) -> None:
    usages = [
        client.chat.completions.create(model="tiny", messages=says("Hm."), max_tokens=7, n=2, seed=1).usage
        for _ in range(2)
    ]
    list(client.completions.create(model="tiny", prompt="Hm.", max_tokens=3, stream=True, seed=1))
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    values = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert values["tot_prompt_tokens_total",] == sum(one.prompt_tokens for one in usages) + 3
    assert values["tot_completion_tokens_total",] == sum(one.completion_tokens for one in usages) + 3
    assert values["tot_cached_prompt_tokens_total",] == usages[0].prompt_tokens - 1
    assert values["tot_forwards_total",] == server.decoder.engine.forwards > 10
    assert (values["tot_requests_running",], values["tot_requests_waiting",]) == (0, 0)
    cache = server.decoder.engine.cache
    slots = [values["tot_kv_slots", state] for state in ("live", "cached", "free")]
    assert slots == [0, cache.stored, cache.capacity - cache.stored]
    assert cache.stored > 0


def test_an_engine_that_has_failed_is_not_healthy(server: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a fault")

    reply = httpx.get(f"{server.url}/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "model": "tiny", "decoder": "ar"})
    server.decoder.engine._scheduler.admit = broken
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    for _ in range(2):  # one request that is there at the failure, and one later
        reply = server.post("/v1/completions", **body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "model_error")
        assert "the engine has failed" in reply.json()["error"]["message"]
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert "the engine has failed" in health.json()["status"]
