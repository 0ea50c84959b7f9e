"""Prometheus metrics of requests, tokens and the engine's cache, with one registry per server.

Label values are from a fixed set: text from a client never becomes a label.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tot.decoders.request import Usage
from tot.decoders.serving.gate import Gate

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/metrics")
_OF_USAGE = (
    ("prompt_tokens", "tot_prompt_tokens", "Prompt tokens of completions."),
    ("reused_prompt_tokens", "tot_cached_prompt_tokens", "Prompt tokens of completions, reused from the cache."),
    ("new_tokens", "tot_completion_tokens", "New tokens of completions."),
    ("drafted", "tot_drafted_tokens", "Draft tokens of completions."),
    ("accepted", "tot_accepted_tokens", "Draft tokens accepted."),
    ("reached", "tot_reached_positions", "Draft positions at which all earlier draft tokens were accepted."),
)
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counts events of requests, and reads the state of the gates and the engine when the metrics are collected."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("tot_requests", "HTTP requests with a reply.", ("route", "status"), registry=registry)
        self._hung_up = Counter("tot_disconnects", "Requests whose client disconnected early.", registry=registry)
        self._used = {field: Counter(name, text, registry=registry) for field, name, text in _OF_USAGE}
        about: dict[str, Any] = {"buckets": _BUCKETS, "registry": registry}
        text = "From a request's body to the end of its text."
        self.request_seconds = Histogram("tot_request_seconds", text, **about)
        text = "From a request's body to the first text of a stream."
        self.first_text_seconds = Histogram("tot_first_token_seconds", text, **about)
        self._searches = Counter("tot_searches", "Searches that have ended.", ("model", "outcome"), registry=registry)
        self._thoughts = Counter("tot_thoughts", "Thoughts of searches.", registry=registry)

    def watch_gate(self, kind: str, gate: Gate) -> None:
        """Report the running and the waiting "requests" or "searches" of a gate."""
        for state in ("running", "waiting"):
            gauge = Gauge(f"tot_{kind}_{state}", f"{state.title()} {kind}.", registry=self._registry)
            gauge.set_function(partial(getattr, gate, state))

    def watch_engine(self, engine: Engine) -> None:
        """Report the forward passes and the cache of an engine."""
        self._registry.register(_EngineState(engine))

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Wrap an app to count its replies by route and status."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async def count(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"]
                    route = next((one for one in ROUTES if path == one or path.startswith(f"{one}/")), "other")
                    self._requests.labels(route, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, count)

        return run

    def hung_up(self) -> None:
        self._hung_up.inc()

    def spent(self, usages: Iterable[Usage], thoughts: int = 0) -> None:
        """Count the tokens of complete replies, and the thoughts of searches."""
        self._thoughts.inc(thoughts)
        for usage in usages:
            for field, counter in self._used.items():
                counter.inc(getattr(usage, field))

    def searched(self, model: str, outcome: str) -> None:
        """Count a search that has ended: answered, unanswered, cancelled or failed."""
        self._searches.labels(model, outcome).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineState(Collector):
    """The state of an engine when the metrics are collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        engine, cache = self._engine, self._engine.cache
        yield CounterMetricFamily("tot_forwards", "Forward passes, each shared by all requests.", engine.forwards)
        slots = GaugeMetricFamily("tot_kv_slots", "Key-value cache slots, one per token.", labels=("state",))
        live, stored = cache.live, cache.stored
        for state, count in (("live", live), ("cached", stored - live), ("free", cache.capacity - stored)):
            slots.add_metric((state,), max(0, count))
        yield slots
