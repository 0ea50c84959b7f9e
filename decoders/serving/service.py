"""Sources: the models of a server and their work for a request.

A source is a decoder with its methods, or searches. All of them get the same bodies and give the same events, so a
route knows nothing of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tot.decoders.errors import unknown
from tot.decoders.request import ToolCall, Usage
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.messages_body import MessagesBody
from tot.decoders.serving.metrics import ServerMetrics
from tot.decoders.serving.protocol import ChatBody, TextBody
from tot.decoders.serving.responses_body import ResponsesBody

AnyBody = ChatBody | ResponsesBody | TextBody | MessagesBody


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the text of a sample, of the thinking before it, or of the arguments of a call."""

    index: int
    text: str
    thinking: bool = False
    call: ToolCall | None = None
    """The call, which begins with an empty piece. Its id is the same in all of its pieces."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A complete sample. With `incomplete`, a limit on the whole reply ended it."""

    index: int
    text: str
    thinking: str
    truncated: bool
    incomplete: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the choice."""
    calls: Sequence[ToolCall] = ()
    stopped: bool = False
    """Whether a stop string ended it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the reply's `tot`."""


Emit = Callable[[Piece | Choice], object]


@dataclass(frozen=True, slots=True)
class Result:
    choices: Sequence[Choice]
    usage: Usage
    reasoning_tokens: int


class Work(Protocol):
    """The work of one request."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The additional field `tot` of the reply."""

    def count(self) -> int:
        """Return the number of tokens of the prompt. Raises ServingError if it is not known."""

    async def run(self, emit: Emit, seconds: float) -> Result:
        """Generate. `emit` takes the pieces and choices of a stream as they come, from any thread."""


class Source(Protocol):
    """Models of one kind."""

    gate: Gate
    models: Mapping[str, Mapping[str, Any]]
    """The names of the models, with additional facts for /v1/models."""

    @property
    def failed(self) -> str | None:
        """The error after which no request succeeds; None while it works."""

    def watch(self, metrics: ServerMetrics) -> None:
        """Add the state of its gate to the metrics, and other state."""

    def work(self, body: AnyBody) -> Work:
        """Prepare a request. Raises ServingError, TotError or pydantic's ValidationError if it is invalid."""


class Service:
    """All models of a server. A request goes to the first source that has its model."""

    def __init__(self, sources: Sequence[Source], limits: Limits, about: Mapping[str, Any]) -> None:
        """`about`: additional fields of /health."""
        self.limits = limits
        self.about = dict(about)
        self.metrics = ServerMetrics()
        self.running: set[asyncio.Task[Result]] = set()
        """The work of all requests, waiting ones included."""
        self.models: dict[str, Source] = {}
        self._sources = sources
        for source in sources:
            source.watch(self.metrics)
            self.models |= {name: source for name in source.models if name not in self.models}

    @property
    def status(self) -> str:
        """ "ok", "stopping", or the error after which no request succeeds."""
        if any(source.gate.closed for source in self._sources):
            return "stopping"
        return next((source.failed for source in self._sources if source.failed), "ok")

    def source(self, model: str) -> Source:
        """Return the source of a model. Raises ServingError if there is no such model."""
        if model not in self.models:
            raise ServingError(404, unknown("model", model, self.models), "model", "model_not_found")
        return self.models[model]

    def stop_admitting(self) -> None:
        for source in self._sources:
            source.gate.closed = True

    def cancel_all(self) -> None:
        """Cancel all work. Its clients get an error. Call it in the event loop."""
        for running in self.running:
            if not running.cancelling():
                running.cancel()
