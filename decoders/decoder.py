"""Decoders by name: `load_decoder("ar", model=...)` gives an object that turns requests into completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from tot.decoders.autoregressive import Autoregressive
from tot.decoders.budget import Meter
from tot.decoders.drafters import Drafter, DrafterChain, LookupDrafter, ModelDrafter, check_vocabulary
from tot.decoders.early_exit import first_layers
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.job import Handle, PolicyFactory
from tot.decoders.engine.loading import load_model
from tot.decoders.errors import OptionError, unknown
from tot.decoders.request import Completion, Request
from tot.decoders.speculative import MCSDOptions, SDOptions, Speculation, Speculative


class Decoder(Protocol):
    """Requests in, completions out: flat and request-major, n completions a request."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


class NoOptions(BaseModel):
    """For a method that has nothing to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Ready(NamedTuple):
    """A method set up on an engine: the policy each request gets, and how to give back what they share."""

    policy: PolicyFactory
    close: Callable[[], None]


class Method(NamedTuple):
    set_up: Callable[[Engine, Any], Ready]
    options: type[BaseModel]


def _autoregressive(engine: Engine, options: NoOptions) -> Ready:
    return Ready(Autoregressive, lambda: None)


def _speculative(engine: Engine, options: SDOptions | MCSDOptions) -> Ready:
    drafter = make_drafter(options.draft, engine)
    return Ready(partial(Speculative, companion=Speculation(drafter, options)), drafter.close)


METHODS: dict[str, Method] = {
    "ar": Method(_autoregressive, NoOptions),
    "mcsd": Method(_speculative, MCSDOptions),
    "sd": Method(_speculative, SDOptions),
}
"""The decoding methods by name: how each is set up, and its options."""


def make_drafter(draft: Any, engine: Engine) -> Drafter:
    """A drafter for an engine's model, from what the option `draft` may be.

    None and "lookup" look up; "early-exit" or "early-exit:6" drafts with the target's first layers; other names, paths
    and model objects with that model; several, in a list or with commas, each for texts that those before had nothing
    for. A drafter is itself. Raises ModelError where the draft's tokens are not the target's.
    """
    if isinstance(draft, LookupDrafter | ModelDrafter | DrafterChain):
        return draft
    if isinstance(draft, str) and "," in draft:
        draft = [part.strip() for part in draft.split(",")]
    if isinstance(draft, list | tuple):
        return DrafterChain([make_drafter(part, engine) for part in draft])
    if draft is None or draft == "lookup":
        return LookupDrafter()
    target = engine.loaded
    size = target.model.config.vocab_size
    if isinstance(draft, str) and re.fullmatch(r"early-exit(:\d{1,4})?", draft):
        layers = draft.partition(":")[2]
        return ModelDrafter(first_layers(target, int(layers) if layers else None), engine.tree.capacity, size)
    named = isinstance(draft, str | Path)
    if not named and not hasattr(draft, "config"):
        raise OptionError(f"draft={draft!r} is no model: give a name, a path, a model object, lookup or early-exit:N")
    loaded = load_model(
        draft,
        tokenizer=None if named else target.tokenizer,
        dtype=str(target.dtype).removeprefix("torch.") if named else "auto",
        device=str(target.device),
    )
    check_vocabulary(loaded.tokenizer, target.tokenizer)
    return ModelDrafter(loaded, engine.tree.capacity, size)


class LocalDecoder:
    """One decoding method on one engine. Closing it closes the engine, unless the engine was given."""

    def __init__(self, name: str, engine: Engine, method: Ready, owns_engine: bool) -> None:
        self.name = name
        self.engine = engine
        self._policy = method.policy
        self._close_method = method.close
        self._owns_engine = owns_engine

    @property
    def model(self) -> Any:
        return self.engine.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.engine.loaded.tokenizer

    def submit(self, requests: Sequence[Request], meter: Meter | None = None, stream: bool = False) -> list[Handle]:
        """Queue requests, to start in the same step; a handle each, to be awaited, iterated over or cancelled."""
        return self.engine.submit_all(requests, [self._policy] * len(requests), meter, stream)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode all requests, packed. Raises RequestError or ModelError for the first that fails."""
        return [completion for handle in self.submit(requests) for completion in handle.result()]

    def close(self) -> None:
        if self._owns_engine:
            self.engine.close()
        self._close_method()

    def __enter__(self) -> LocalDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_decoder(
    name: str = "ar",
    model: str | Path | Any = "smollm2-135m",
    *,
    tokenizer: Any = None,
    engine: Engine | None = None,
    dtype: str = "auto",
    device: str = "auto",
    kv_budget: int | str | None = None,
    **options: Any,
) -> LocalDecoder:
    """A decoder by name, on a model of its own or on a shared `engine` (which then has its own model and budget).

    `model` is a name, a hub id, a folder, a GGUF file, or a model object (with `tokenizer`); `kv_budget` is in tokens
    or bytes ("1.5GiB"). Raises OptionError for an unknown method or option, ModelError for a model that can't be had.
    """
    method = METHODS.get(name)
    if method is None:
        raise OptionError(unknown("decoder", name, METHODS))
    try:
        chosen = method.options(**options)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(method.options.model_fields) or "none"
        place = f", option {first['loc'][0]}" if first["loc"] else ""
        raise OptionError(f"decoder {name}{place}: {first['msg']} (its options: {known})") from None
    if engine is not None:
        return LocalDecoder(name, engine, method.set_up(engine, chosen), owns_engine=False)
    with ExitStack() as on_failure:
        own = Engine(load_model(model, tokenizer=tokenizer, dtype=dtype, device=device), kv_budget)
        on_failure.callback(own.close)
        decoder = LocalDecoder(name, own, method.set_up(own, chosen), owns_engine=True)
        on_failure.pop_all()
    return decoder
