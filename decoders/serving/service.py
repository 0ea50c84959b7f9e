"""The models of a server, from several sources: decoding methods, and searches. A source makes work of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from tot.decoders.errors import unknown
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.metrics import ServerMetrics

Event = dict[str, Any] | str
"""JSON, whose `type` is the name of the event, or text."""
Emit = Callable[[Event], object]


class Work(Protocol):
    """The work of one request."""

    @property
    def stream(self) -> bool:
        """Whether the reply is a stream."""

    async def run(self, emit: Emit, metrics: ServerMetrics) -> None:
        """Do the work. `emit` sends an event of the stream, or the whole reply, from any thread."""

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""


class Source(Protocol):
    """Models of one kind."""

    gate: Gate
    paths: Collection[str]
    """The routes whose requests it answers."""
    models: Mapping[str, Mapping[str, Any]]
    """The names of the models, with additional facts for /v1/models."""

    @property
    def failed(self) -> str | None:
        """The error after which no request succeeds; None while it works."""

    def watch(self, metrics: ServerMetrics) -> None:
        """Add the state of its gate to the metrics, and other state."""

    def work(self, path: str, body: bytes, client: str) -> Work:
        """Read a request. Raises ServingError, TotError or pydantic's ValidationError if it is invalid."""


class Service:
    """All models of a server. A request goes to the first source that answers its route and has its model."""

    def __init__(self, sources: Sequence[Source], limits: Limits, about: Mapping[str, Any]) -> None:
        """`about` is what /health reports beside the status."""
        self.limits = limits
        self.about = dict(about)
        self.metrics = ServerMetrics()
        self.running: set[asyncio.Task[None]] = set()
        """The work of all requests, waiting ones included."""
        self.models: dict[str, Mapping[str, Any]] = {}
        """All models by name, with the additional facts."""
        self._sources = sources
        for source in sources:
            source.watch(self.metrics)
            self.models |= {name: source.models[name] for name in source.models if name not in self.models}

    @property
    def status(self) -> str:
        """ "ok", "stopping", or the error after which no request succeeds."""
        if any(source.gate.closed for source in self._sources):
            return "stopping"
        return next((source.failed for source in self._sources if source.failed), "ok")

    def check(self, name: str) -> None:
        """Raise ServingError if there is no such model."""
        if name not in self.models:
            raise ServingError(404, unknown("model", name, self.models), "model", "model_not_found")

    def work(self, path: str, name: str, body: bytes, client: str) -> Work:
        """Read a request for a model. Raises ServingError, TotError or pydantic's ValidationError if it is invalid."""
        self.check(name)
        sources = [source for source in self._sources if name in source.models]
        for source in sources:
            if path in source.paths:
                return source.work(path, body, client)
        paths = " or ".join(path for source in sources for path in source.paths)
        raise ServingError(400, f"{name} does not answer {path}: use {paths}", "model")

    def stop_admitting(self) -> None:
        for source in self._sources:
            source.gate.closed = True

    def cancel_all(self) -> None:
        """Cancel all work. Its clients get an error. Call it in the event loop."""
        for running in self.running:
            if not running.cancelling():
                running.cancel()
