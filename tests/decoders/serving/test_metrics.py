"""`/metrics` reports requests, tokens and slots in Prometheus's format, and `/health` whether the engine works."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
from prometheus_client.parser import text_string_to_metric_families


def samples(server: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_tokens_and_slots_are_counted(server: Any, client: openai.OpenAI, says: Any) -> None:
    spent = [
        client.chat.completions.create(model="tiny", messages=says("Hm."), max_tokens=7, n=2, seed=1).usage
        for _ in range(2)
    ]
    list(client.completions.create(model="tiny", prompt="Hm.", max_tokens=3, stream=True, seed=1))
    for path in ("/v1/completions", "/nowhere/at/all", "/<script>"):
        server.post(path, model="tiny")
    counted = samples(server)

    def requests(route: str, status: int) -> float:
        return counted["tot_requests_total", frozenset({("route", route), ("status", str(status))})]

    assert requests("/v1/chat/completions", 200) == 2
    assert requests("/v1/completions", 200) == 1
    assert requests("/v1/completions", 400) == 1
    assert requests("other", 404) == 2
    none: frozenset[tuple[str, str]] = frozenset()
    assert counted["tot_prompt_tokens_total", none] == sum(one.prompt_tokens for one in spent) + 3
    assert counted["tot_completion_tokens_total", none] == sum(one.completion_tokens for one in spent) + 3
    assert counted["tot_cached_prompt_tokens_total", none] == spent[0].prompt_tokens - 1
    assert counted["tot_forwards_total", none] == server.decoder.engine.forwards > 10
    assert counted["tot_request_seconds_count", none] == 3
    assert counted["tot_first_token_seconds_count", none] == 1
    assert (counted["tot_requests_running", none], counted["tot_requests_waiting", none]) == (0, 0)
    slots = {state: counted["tot_kv_slots", frozenset({("state", state)})] for state in ("live", "cached", "free")}
    assert slots["live"] == 0
    assert slots["cached"] == server.decoder.engine.cache.stored > 0
    assert sum(slots.values()) == server.decoder.engine.cache.capacity


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
