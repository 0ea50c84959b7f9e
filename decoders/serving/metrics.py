"""Prometheus metrics: what was asked and answered, what it cost, what the engine holds. One registry a server.

Labels are few and known beforehand: no text of a client's becomes one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tot.decoders.request import Completion
from tot.decoders.serving.service import Service

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Timed:
    """The clock of one request."""

    def __init__(self, first_token: Histogram) -> None:
        self._began = time.perf_counter()
        self._first_token: Histogram | None = first_token

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def first_token(self) -> None:
        """Text has come; all but the first call of these is nothing new."""
        if self._first_token is not None:
            self._first_token.observe(self.seconds)
            self._first_token = None


class Metrics:
    """Counts what happens to requests; asks the service about the rest when it is read."""

    def __init__(self, service: Service) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("tot_requests", "HTTP requests replied to.", ("route", "status"), registry=registry)
        self._hung_up = Counter("tot_disconnects", "Requests whose client hung up before the reply.", registry=registry)
        self._prompt = Counter("tot_prompt_tokens", "Prompt tokens of texts replied to.", registry=registry)
        self._cached = Counter("tot_cached_prompt_tokens", "Of them, those computed before.", registry=registry)
        self._new = Counter("tot_completion_tokens", "New tokens of texts replied to.", registry=registry)
        self._drafted = Counter("tot_drafted_tokens", "Tokens drafted for them.", registry=registry)
        self._accepted = Counter("tot_accepted_tokens", "Drafted tokens accepted.", registry=registry)
        self._reached = Counter(
            "tot_reached_positions", "Positions of drafts at which all before had been accepted.", registry=registry
        )
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
            used = completion.usage
            self._prompt.inc(used.prompt_tokens)
            self._cached.inc(used.reused_prompt_tokens)
            self._new.inc(used.new_tokens)
            self._drafted.inc(used.drafted)
            self._accepted.inc(used.accepted)
            self._reached.inc(used.reached)

    @contextmanager
    def timed(self) -> Iterator[Timed]:
        """Times what ends well."""
        clock = Timed(self._first)
        yield clock
        self._whole.observe(clock.seconds)

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
