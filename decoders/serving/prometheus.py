"""Prometheus metrics: what was asked and answered, what it cost, what the engine holds. One registry a server.

Labels are few and known beforehand: no text of a client's becomes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tot.decoders.request import Completion
from tot.decoders.serving.service import Service

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_OF_USAGE = (
    ("prompt_tokens", "tot_prompt_tokens", "Prompt tokens of texts replied to."),
    ("reused_prompt_tokens", "tot_cached_prompt_tokens", "Of them, those computed before."),
    ("new_tokens", "tot_completion_tokens", "New tokens of texts replied to."),
    ("drafted", "tot_drafted_tokens", "Tokens drafted for them."),
    ("accepted", "tot_accepted_tokens", "Drafted tokens accepted."),
    ("reached", "tot_reached_positions", "Positions of drafts at which all before had been accepted."),
)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PrometheusMetrics:
    """Counts what happens to requests; asks the service about the rest when it is read."""

    def __init__(self, service: Service) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("tot_requests", "HTTP requests replied to.", ("route", "status"), registry=registry)
        self._hung_up = Counter("tot_disconnects", "Requests whose client hung up before the reply.", registry=registry)
        self._used = {field: Counter(name, text, registry=registry) for field, name, text in _OF_USAGE}
        self._whole = Histogram(
            "tot_request_seconds", "From a request's body to the end of its text.", buckets=_SECONDS, registry=registry
        )
        self._first = Histogram(
            "tot_first_token_seconds", "The same, to the first text of a stream.", buckets=_SECONDS, registry=registry
        )
        registry.register(_EngineState(service))

    def replied(self, path: str, status: int) -> None:
        known = next((route for route in ROUTES if path == route or path.startswith(f"{route}/")), "other")
        self._requests.labels(known, str(status)).inc()

    def hung_up(self) -> None:
        self._hung_up.inc()

    def spent(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Count texts that were told whole."""
        for completion in (one for several in completions for one in several):
            for field, counter in self._used.items():
                counter.inc(getattr(completion.usage, field))

    @contextmanager
    def timed(self) -> Iterator[Callable[[], None]]:
        """Times what ends well. What it gives is to be called as text comes: all but the first call is nothing new."""
        began, first = time.perf_counter(), [self._first]

        def text_came() -> None:
            if first:
                first.pop().observe(time.perf_counter() - began)

        yield text_came
        self._whole.observe(time.perf_counter() - began)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineState(Collector):
    """What is so just now."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        gate, engine = self._service.gate, self._service.engine
        yield GaugeMetricFamily("tot_requests_running", "Requests at the engine.", gate.running)
        yield GaugeMetricFamily("tot_requests_waiting", "Requests that wait for a place.", gate.waiting)
        yield CounterMetricFamily("tot_forwards", "Forward passes, each shared by all that ran.", engine.forwards)
        slots = GaugeMetricFamily("tot_kv_slots", "Slots for keys and values, one a token.", labels=("state",))
        live, stored = engine.cache.live, engine.cache.stored
        for state, count in (("live", live), ("cached", stored - live), ("free", engine.cache.capacity - stored)):
            slots.add_metric((state,), max(0, count))
        yield slots
