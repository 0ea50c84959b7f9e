"""Prometheus metrics of tokens, requests and the engine's cache, with one registry per server.

Label values are from a fixed set: text from a client never becomes a label.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tot.decoders.request import Usage
from tot.decoders.serving.gate import Gate

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine


class ServerMetrics:
    """Counts events of requests, and reads the state of the gates and the engine when the metrics are collected."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.disconnects = self.counter("tot_disconnects", "Requests whose client disconnected early.")
        self._used = {
            "prompt_tokens": self.counter("tot_prompt_tokens", "Prompt tokens."),
            "reused_prompt_tokens": self.counter("tot_cached_prompt_tokens", "Prompt tokens in the cache."),
            "new_tokens": self.counter("tot_completion_tokens", "New tokens."),
        }

    def counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def watch_gate(self, kind: str, gate: Gate) -> None:
        """Report the running and the waiting "requests" or "searches" of a gate."""
        for state in ("running", "waiting"):
            gauge = Gauge(f"tot_{kind}_{state}", f"{state.title()} {kind}.", registry=self._registry)
            gauge.set_function(partial(getattr, gate, state))

    def watch_engine(self, engine: Engine) -> None:
        """Report the forward passes and the cache of an engine."""
        self._registry.register(_EngineState(engine))

    def spent(self, usage: Usage) -> None:
        """Count the tokens of a complete reply."""
        for name, counter in self._used.items():
            counter.inc(getattr(usage, name))

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
