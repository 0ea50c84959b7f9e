"""What a decoder is, and decoders by name: `load_decoder("ar", model=...)` turns requests into completions.

Importing this imports no torch: a method is imported when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable
from weakref import WeakSet

from pydantic import BaseModel

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, RequestError, TotError, unknown, validated
from tot.decoders.methods.method import Method
from tot.decoders.methods.presets import PRESETS
from tot.decoders.models.model_names import Quantize
from tot.decoders.registry import Registry
from tot.decoders.request import Completion, Request

if TYPE_CHECKING:
    from tot.decoders.drafting.drafters import Drafter
    from tot.decoders.engine.engine import Engine
    from tot.decoders.engine.sequence import Handle
    from tot.decoders.methods.method import OpenedMethod
    from tot.decoders.remote.decoder import RemoteDecoder

METHODS = Registry("decoder", "tot.decoders", PRESETS)
"""The decoding methods that run here, and decoders of one's own, by name."""
REMOTE = ("openai",)
"""The decoders that ask a server, and have no model here."""


class Decoder(Protocol):
    """Requests in, completions out: flat and request-major, n completions a request."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@runtime_checkable
class AsyncDecoder(Decoder, Protocol):
    """A decoder that many searches can await at once, and whose texts can be cancelled and metered in the middle."""

    async def complete(self, requests: Sequence[Request], meter: Meter | None = None) -> list[list[Completion]]: ...


def find_decoder(name: str) -> Any:
    """The decoding method of that name; or a user's own decoder, or its class. Raises OptionError."""
    if name in REMOTE or (":" not in name and name not in METHODS):
        raise OptionError(unknown("decoder", name, [*METHODS, *REMOTE]))
    return METHODS.find(name)


def find_method(name: str) -> Method:
    """The decoding method of that name. Raises OptionError for an unknown name."""
    if not isinstance(method := find_decoder(name), Method):
        raise OptionError(f"{name} is a decoder, and no decoding method: make it, and give the object")
    return method


def method_names() -> list[str]:
    """The names of decoding methods, without those of users' own decoders."""
    return [name for name in METHODS if isinstance(METHODS[name], Method)]


def checked_options(name: str, options: Mapping[str, Any]) -> BaseModel:
    """The options of a method that runs here. Raises OptionError for an unknown method or option."""
    return validated(find_method(name).options, options, f"decoder {name}")


@overload
def load_decoder(name: Literal["openai"], model: str = ..., **options: Any) -> RemoteDecoder: ...


@overload
def load_decoder(
    name: str = ...,
    model: str | Path | Any = ...,
    *,
    tokenizer: Any = ...,
    engine: Engine | None = ...,
    dtype: str = ...,
    device: str = ...,
    kv_budget: int | str | None = ...,
    quantize: Quantize = ...,
    **options: Any,
) -> LocalDecoder: ...


def load_decoder(
    name: str = "ar",
    model: str | Path | Any = "smollm2-135m",
    *,
    tokenizer: Any = None,
    engine: Engine | None = None,
    dtype: str = "auto",
    device: str = "auto",
    kv_budget: int | str | None = None,
    quantize: Quantize = "auto",
    **options: Any,
) -> LocalDecoder | RemoteDecoder:
    """A decoder by name, on a model of its own or on a shared `engine` (which then has its own model and budget).

    `model` is a name, a hub id, a folder, a GGUF file, or a model object (with `tokenizer`); `kv_budget` is in tokens
    or bytes ("1.5GiB"); `quantize` as Quantize says, for Llama-like models on CPUs. With "openai" the model is a name
    that the server at `base_url` knows, and nothing is loaded here. Raises OptionError for an unknown method or option,
    ModelError for a model that can't be had.
    """
    if name in REMOTE:
        local = {"tokenizer": tokenizer, "engine": engine, "kv_budget": kv_budget}
        local |= {"dtype": dtype, "device": device, "quantize": quantize}
        for option, value in local.items():
            if value not in (None, "auto"):
                raise OptionError(f"{option} is for models that run here: leave it out, the server has its own")
        from tot.decoders.remote.decoder import open_remote

        return open_remote(model, options)
    method, chosen = find_method(name), checked_options(name, options)
    if engine is not None and quantize != "auto":
        raise OptionError(f"quantize={quantize} is for the engine that is shared: give it to the one who made that")
    from tot.decoders.engine.open_models import close_models, open_engine

    with ExitStack() as stack:
        owned = engine is None
        if engine is None:
            close_models()
            engine = open_engine(model, tokenizer, dtype, device, kv_budget, quantize)
            stack.callback(engine.close)
        opened = method.open(engine, chosen, stack)
        return LocalDecoder(name, engine, opened, stack.pop_all(), owned, not method.few_shot)


_WORTH_GIVING_BACK = 2**24
"""Bytes of weights from which it takes less time to give them back than it took to load them."""


class LocalDecoder:
    """One decoding method on one engine. Closing it closes the engine, unless the engine was given."""

    def __init__(
        self, name: str, engine: Engine, method: OpenedMethod, shared: ExitStack, owns_engine: bool, chats: bool = True
    ) -> None:
        self.name = name
        self.engine = engine
        self._method: OpenedMethod | None = method
        self._shared = shared
        self._owns_engine = owns_engine
        self._chats = chats
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
        """The transformers module; where the engine computes without one, it is loaded now."""
        return self.engine.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.engine.loaded.tokenizer

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template, and the method needs no other prompts."""
        return self.tokenizer.chat_template is not None and self._chats

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
            weights = self.engine.loaded.size * self.engine.loaded.dtype.itemsize
            self._shared.close()
            if weights > _WORTH_GIVING_BACK:
                from tot.decoders.machine import give_back

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
