"""LocalDecoder: one decoding method on one engine, as `load_decoder` opens it for a model that runs here."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from tot.decoders.budget import Meter
from tot.decoders.errors import RequestError, TotError
from tot.decoders.methods.options import FEW_SHOT
from tot.decoders.request import Completion, Request

if TYPE_CHECKING:
    from tot.decoders.drafting.drafters import Drafter
    from tot.decoders.engine.engine import Engine
    from tot.decoders.engine.job import Handle
    from tot.decoders.methods.method import OpenedMethod

_WORTH_GIVING_BACK = 2**24
"""Bytes of weights from which it takes less time to give them back than it took to load them."""


class LocalDecoder:
    """One decoding method on one engine. Closing it closes the engine, unless the engine was given."""

    def __init__(self, name: str, engine: Engine, method: OpenedMethod, shared: ExitStack, owns_engine: bool) -> None:
        self.name = name
        self.engine = engine
        self._method: OpenedMethod | None = method
        self._shared = shared
        self._owns_engine = owns_engine
        self._handles: WeakSet[Handle] = WeakSet()

    @property
    def method(self) -> OpenedMethod:
        """How each request is decoded."""
        if self._method is None:
            raise RequestError("this decoder is closed: make a new one")
        return self._method

    @property
    def drafter(self) -> Drafter | None:
        """What drafts for it, if anything does."""
        return self.method.drafter

    @property
    def model(self) -> Any:
        return self.engine.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.engine.loaded.tokenizer

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template, and the method needs no other prompts."""
        return self.tokenizer.chat_template is not None and self.name not in FEW_SHOT

    @property
    def writes_steps(self) -> bool:
        """Whether the steps of a request are written side by side."""
        return self.method.writes_steps

    def submit(self, requests: Sequence[Request], meter: Meter | None = None, stream: bool = False) -> list[Handle]:
        """Queue requests, to start in the same step; a handle each, to be awaited, iterated over or cancelled."""
        method = self.method
        if method.prepare is not None:
            requests = [method.prepare(request) for request in requests]
        handles = self.engine.submit_all(requests, [method.policy] * len(requests), meter, stream)
        self._handles.update(handles)
        return handles

    async def complete(self, requests: Sequence[Request], meter: Meter | None = None) -> list[list[Completion]]:
        """The n completions of each request, counted on `meter` as they grow. Cancelled, or where one fails, it gives
        all slots back. Raises RequestError or ModelError for the first that fails."""
        handles = self.submit(requests, meter)
        try:
            return [await handle for handle in handles]
        finally:  # one failed, or the search was cancelled: the others' slots are wanted elsewhere
            for handle in handles:
                if not handle.future.done():
                    handle.cancel()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode all requests, packed. Raises RequestError or ModelError for the first that fails."""
        return [completion for handle in self.submit(requests) for completion in handle.result()]

    def close(self) -> None:
        """Its requests in flight end as cancelled. An engine of its own goes, and with it the model's memory."""
        if self._method is None:
            return
        self._method = None
        running = [handle for handle in self._handles if not handle.future.done()]
        for handle in running:
            handle.cancel()
        wait([handle.future for handle in running])
        if self._owns_engine:
            weights = sum(weight.nbytes for weight in self.model.parameters())
            self._shared.close()
            if weights > _WORTH_GIVING_BACK:
                from tot.decoders.memory import give_back

                give_back()
            return
        try:
            self.engine.call(self._shared.close)  # between two steps of what others have there
        except TotError:  # it is closed or has failed, so nothing runs
            self._shared.close()

    def __enter__(self) -> LocalDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
