"""The decoder interface, and decoders by name: `load_decoder("ar", model=...)` turns requests into completions.

Importing this module does not import torch: a method is imported at first use.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable
from weakref import WeakSet

from pydantic import BaseModel

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, RequestError, TotError, unknown, validated
from tot.decoders.methods.method import Method
from tot.decoders.models.engine_options import EngineOptions
from tot.decoders.registry import Registry
from tot.decoders.request import Completion, Request, Sampling, ToolCall
from tot.decoders.tools import OWN, TRIAL, TRIAL_TOOL, CallForm, as_json

if TYPE_CHECKING:
    from tot.decoders.drafting.drafters import Drafter
    from tot.decoders.engine.engine import Engine
    from tot.decoders.engine.sequence import Handle
    from tot.decoders.methods.method import OpenedMethod
    from tot.decoders.remote.decoder import RemoteDecoder

METHODS = Registry("decoder", "tot.decoders")
"""Local decoding methods and user-defined decoders, by name."""
_TRIAL_TOKENS = 16
"""Tokens within which a model that writes calls in a form begins one."""
REMOTE = ("openai",)
"""Decoders that send requests to a server and load no model."""


class Decoder(Protocol):
    """Turns requests into completions: a flat, request-major list with n completions per request.

    Searches call `generate` in several threads at the same time: use a lock if it is not thread-safe.
    """

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


class Pending(Protocol):
    """The completions of a started request: await them, or cancel the request. A `Handle` or an asyncio.Task."""

    def __await__(self) -> Generator[Any, None, list[Completion]]: ...

    def cancel(self) -> Any: ...


@runtime_checkable
class AsyncDecoder(Decoder, Protocol):
    """A decoder that several searches can await concurrently, with cancellation and metering during decoding."""

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> Sequence[Pending]:
        """Start requests together and return the pending completions of each. Called in an event loop.

        A cancelled request may still deliver its text so far, with the finish reason "cancelled".
        """


def find_decoder(name: str) -> Any:
    """Return the decoding method, user-defined decoder or decoder class of that name. Raises OptionError."""
    if name in REMOTE or (":" not in name and name not in METHODS):
        raise OptionError(unknown("decoder", name, [*METHODS, *REMOTE]))
    return METHODS.find(name)


def find_method(name: str) -> Method:
    """Return the decoding method of that name. Raises OptionError for an unknown name or a decoder."""
    if not isinstance(method := find_decoder(name), Method):
        raise OptionError(f"{name} is a decoder, not a decoding method: create it, and pass the object")
    return method


def method_names() -> list[str]:
    """Return the names of decoding methods, without user-defined decoders."""
    return [name for name in METHODS if isinstance(METHODS[name], Method)]


def checked_options(name: str, options: Mapping[str, Any]) -> BaseModel:
    """Validate the options of a local method. Raises OptionError for an unknown method or option."""
    return validated(find_method(name).options, options, f"decoder {name}")


@overload
def load_decoder(name: Literal["openai"], model: str = ..., **options: Any) -> RemoteDecoder: ...


@overload
def load_decoder(
    name: str = ..., model: str | Path | Any = ..., *, tokenizer: Any = ..., engine: Engine | None = ..., **options: Any
) -> LocalDecoder: ...


def load_decoder(
    name: str = "ar",
    model: str | Path | Any = "smollm2-135m",
    *,
    tokenizer: Any = None,
    engine: Engine | None = None,
    **options: Any,
) -> LocalDecoder | RemoteDecoder:
    """Load a decoder by name.

    Args:
        name: A decoding method, or "openai" for a server at the option `base_url`, which loads no model.
        model: A known name, a hub id, a folder, a GGUF file, or a model object; for "openai" the server's model name.
        tokenizer: The tokenizer of a model object.
        engine: A shared engine to use instead of a new one; its model and options apply.
        options: The options of the method, and of its engine (the fields of `EngineOptions`).

    Raises:
        OptionError: The method or an option is unknown.
        ModelError: The model can't be loaded.
    """
    of_engine = {option: options.pop(option) for option in EngineOptions.model_fields if option in options}
    given = validated(EngineOptions, of_engine, "engine").model_dump(exclude_defaults=True)
    if name in REMOTE:
        for option, value in {**given, "tokenizer": tokenizer, "engine": engine}.items():
            if value is not None:
                raise OptionError(f"{option} is for local models: leave it out, the server has its own")
        from tot.decoders.remote.decoder import open_remote

        return open_remote(model, options)
    method, method_options = find_method(name), checked_options(name, options)
    if engine is not None and given:
        shown = ", ".join(f"{option}={value}" for option, value in given.items())
        raise OptionError(f"{shown} has no effect on a shared engine: set it when you create the engine")
    from tot.decoders.engine.open_models import close_models, open_engine

    with ExitStack() as stack:
        owned = engine is None
        if engine is None:
            close_models()
            engine = open_engine(model, tokenizer, **given)
            stack.callback(engine.close)
        opened = method.open(engine, method_options, stack)
        return LocalDecoder(name, engine, opened, stack.pop_all(), owned, method.few_shot)


_MIN_BYTES_TO_RETURN = 2**24
"""Minimum bytes of weights for which returning memory to the system is faster than loading them."""


class LocalDecoder:
    """One decoding method on one engine. Closing it closes the engine, unless the engine is shared."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        method: OpenedMethod,
        shared: ExitStack,
        owns_engine: bool,
        few_shot: bool = False,
    ) -> None:
        self.name = name
        self.engine = engine
        self.few_shot = few_shot
        """Whether the method needs few-shot prompts."""
        self._method: OpenedMethod | None = method
        self._shared = shared
        self._owns_engine = owns_engine
        self._bytes = engine.loaded.size * engine.loaded.dtype.itemsize if owns_engine else 0
        self._handles: WeakSet[Handle] = WeakSet()

    @property
    def method(self) -> OpenedMethod:
        """The opened decoding method."""
        if self._method is None:
            raise RequestError("this decoder is closed: make a new one")
        return self._method

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the method, if any."""
        return self.method.drafter

    @property
    def model(self) -> Any:
        """The transformers module. Loads it if the engine runs without one."""
        return self.engine.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.engine.loaded.tokenizer

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.chat_template is not None

    @property
    def cuts_rationales(self) -> bool:
        """Whether the method may cut the rationale of a request with an answer trigger."""
        return self.method.program is not None and not self.method.writes_steps

    @property
    def cheap_samples(self) -> int:
        """How many samples are decoded together in at most 1.75 times the time of one, by the measured latencies."""
        from tot.decoders.drafting.latency_model import latency_model

        latency = latency_model(self.engine.runner)
        return max(rows for rows in range(1, 17) if latency.of(rows) <= 1.75 * latency.of(1))

    def submit(self, requests: Sequence[Request], meter: Meter | None = None, stream: bool = False) -> list[Handle]:
        """Queue requests, which start in the same step. Returns a handle for each, to await, iterate over or cancel."""
        from tot.decoders.engine.sequence import Call, Handle
        from tot.decoders.methods.choices import ScoreChoices
        from tot.decoders.methods.programs import ProgramHandle, rationale_then_answer
        from tot.decoders.methods.thinking import think_then_answer

        method, engine = self.method, self.engine
        handles: list[Handle] = []
        calls: list[Call] = []
        for request in requests:
            if request.tools:
                constraint = self.calls.constraint(request, engine.codec.control)
                request = request.model_copy(update={"constraint": constraint})
            if request.constraint is not None and method.writes_steps:
                raise RequestError(
                    f"{self.name} writes parallel steps, which no constraint can describe: use ar or auto"
                )
            triggered = request.answer_trigger is not None
            thinks = engine.codec.thinks and not request.choices
            if triggered or thinks or (method.writes_steps and not request.choices):
                program = method.program or rationale_then_answer
                if not (triggered or method.writes_steps):
                    program = think_then_answer
                handle = ProgramHandle(engine, request, method, program, meter, stream)
                calls += handle.calls
                handles.append(handle)
            else:
                handles.append(Handle(engine.wake, stream))
                calls.append(Call(request, ScoreChoices if request.choices else method.policy, handles[-1]))
        engine.submit(calls, meter)
        self._handles.update(handles)
        return handles

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[Handle]:
        """Start requests, counted on `meter` during decoding. A cancelled one delivers the text decoded so far."""
        return self.submit(requests, meter)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode all requests in packed batches. Raises RequestError or ModelError for the first that fails."""
        return [completion for handle in self.submit(requests) for completion in handle.result()]

    def read_calls(self, completion: Completion) -> tuple[str, list[ToolCall]]:
        """Return the text before the calls in a completion of a request with tools, and the calls, with new ids."""
        return self.calls.parse(completion.text)

    @cached_property
    def calls(self) -> CallForm:
        """The form in which the model writes calls: the one of its chat template, if the model really writes it.

        Some models have a template whose form they were not trained for, and then write one call at most.
        """
        codec = self.engine.codec
        if codec.calls.native and not codec.thinks:
            with suppress(RequestError):  # the context is too small
                codec.calls = codec.calls if codec.calls.trigger in self._begin_call() else OWN
        return codec.calls

    def _begin_call(self) -> str:
        """Return the beginning of the model's greedy reply to a question that needs a call."""
        from tot.decoders.engine.sequence import Call, Handle
        from tot.decoders.methods.autoregressive import Autoregressive

        ids = self.engine.codec.encode_prompt((TRIAL,), {"tools": [as_json(TRIAL_TOOL)]})
        request = Request(prompt=tuple(ids), sampling=Sampling(max_tokens=_TRIAL_TOKENS))
        handle = Handle(self.engine.wake, False)
        self.engine.submit([Call(request, Autoregressive, handle)])
        return handle.result()[0].text

    def close(self) -> None:
        """Cancel the requests in flight. Closes the decoder's own engine, which frees the model's memory."""
        if self._method is None:
            return
        self._method = None
        running = [handle for handle in self._handles if not handle.future.done()]
        for handle in running:
            handle.cancel()
        wait([handle.future for handle in running])
        if self._owns_engine:
            self._shared.close()
            if self._bytes > _MIN_BYTES_TO_RETURN:
                from tot.decoders.machine import give_back

                give_back()
            return
        try:
            self.engine.call(self._shared.close)  # between two steps of other decoders
        except TotError:  # the engine is closed or has failed, so nothing runs
            self._shared.close()

    def __enter__(self) -> LocalDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
