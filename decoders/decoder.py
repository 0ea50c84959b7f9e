"""Decoders by name: `load_decoder("ar", model=...)` gives an object that turns requests into completions."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload
from weakref import WeakSet

from pydantic import BaseModel, ConfigDict, ValidationError

from tot.decoders.budget import Meter
from tot.decoders.drafting.drafters import Drafter, DrafterChain, LookupDrafter, ModelDrafter, check_vocabulary
from tot.decoders.drafting.early_exit import first_layers
from tot.decoders.drafting.latency_model import engine_costs, latency_model, warn_if_slow
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.job import Handle, PolicyFactory
from tot.decoders.engine.memory import give_back
from tot.decoders.errors import OptionError, RequestError, TotError, unknown
from tot.decoders.kernels.forward import NativeForward, Quantization
from tot.decoders.kernels.rotary import inverse_frequencies
from tot.decoders.methods.auto import Auto, AutoOptions, Choosing
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.methods.fastcot import Buffers, FastCoT, FastCoTOptions
from tot.decoders.methods.jacobi import Jacobi, JacobiOptions, Windows
from tot.decoders.methods.lookahead import Lookahead, LookaheadOptions, Looking, Pool
from tot.decoders.methods.pdos.parallel_steps import ParallelSteps
from tot.decoders.methods.pdos.steps_format import PDOSOptions, StepsFormat
from tot.decoders.methods.seed import Rounds, Scheduled, SEEDOptions
from tot.decoders.methods.speculative import MCSDOptions, SDOptions, Speculation, Speculative
from tot.decoders.models.loading import LoadedModel, load_model
from tot.decoders.models.model_names import draft_folder
from tot.decoders.open_models import close_models, model_key
from tot.decoders.protocol import REMOTE
from tot.decoders.remote.decoder import RemoteDecoder, open_remote
from tot.decoders.request import Completion, Purpose, Request

log = logging.getLogger(__name__)

_WORTH_GIVING_BACK = 2**24
"""Bytes of weights from which it takes less time to give them back than it took to load them."""


class NoOptions(BaseModel):
    """For a method that has nothing to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Ready(NamedTuple):
    """A method set up on an engine: the policy each request gets, and what drafts."""

    policy: PolicyFactory
    drafter: Drafter | None = None
    prepare: Callable[[Request], Request] | None = None
    """What it does to a request beforehand: adds instructions to the prompt, say."""
    choices: Callable[[], dict[Purpose, str]] = dict
    """What it chose by itself so far."""


class Method(NamedTuple):
    set_up: Callable[[Engine, Any, ExitStack], Ready]
    """On an engine, with options; the stack closes what its requests share."""
    options: type[BaseModel]


def _auto(engine: Engine, options: AutoOptions, stack: ExitStack) -> Ready:
    trained = _trained_draft(engine, stack)
    costs = engine_costs(engine), None if trained is None else latency_model(trained.runner)
    choosing = Choosing(engine, options, costs, trained)
    stack.callback(choosing.close)
    return Ready(partial(Auto, companion=choosing), choosing.drafter, choices=choosing.choices)


def _trained_draft(engine: Engine, stack: ExitStack) -> ModelDrafter | None:
    """The draft that `tot train-draft` made for the engine's model, where there is one that can be used."""
    if not (draft_folder(engine.loaded.name) / "config.json").exists():
        return None
    try:
        drafter = make_drafter("trained", engine, stack)
    except TotError as error:
        log.warning("the draft that was trained for %s is not used: %s", engine.loaded.name, error)
        return None
    assert isinstance(drafter, ModelDrafter)
    return drafter


def _autoregressive(engine: Engine, options: NoOptions, stack: ExitStack) -> Ready:
    return Ready(Autoregressive)


def _speculative(engine: Engine, options: SDOptions | MCSDOptions, stack: ExitStack) -> Ready:
    drafter = make_drafter(options.draft, engine, stack)
    shared = Speculation(drafter, options, engine)
    return Ready(partial(Speculative, companion=shared), drafter)


def _seed(engine: Engine, options: SEEDOptions, stack: ExitStack) -> Ready:
    drafter = make_drafter(options.draft, engine, stack)
    costs = None
    if options.adapt:
        costs = engine_costs(engine), None if drafter.runner is None else latency_model(drafter.runner)
    if options.policy == "packed":
        packed = Speculation(drafter, options, engine, costs)
        return Ready(partial(Speculative, companion=packed), drafter)
    rounds = Rounds(drafter, options, engine, costs)
    stack.callback(rounds.close)
    return Ready(partial(Scheduled, companion=rounds), drafter)


def _jacobi(engine: Engine, options: JacobiOptions, stack: ExitStack) -> Ready:
    windows = Windows(options.n, options.guess)
    costs = (engine_costs(engine), None) if options.adapt else None
    shared = Speculation(windows, options, engine, costs)
    return Ready(partial(Jacobi, companion=shared, windows=windows, trajectory=options.trajectory), windows)


def _lookahead(engine: Engine, options: LookaheadOptions, stack: ExitStack) -> Ready:
    pool = Pool(options.guesses)
    looking = Looking(pool, options, engine, (engine_costs(engine), None) if options.adapt else None)
    return Ready(partial(Lookahead, companion=looking), pool)


def _fastcot(engine: Engine, options: FastCoTOptions, stack: ExitStack) -> Ready:
    buffers = Buffers(options.window, engine_costs(engine) if options.window is None else None)
    shared = Speculation(buffers, options, engine)
    return Ready(partial(FastCoT, companion=shared, buffers=buffers, options=options), buffers)


def _pdos(engine: Engine, options: PDOSOptions, stack: ExitStack) -> Ready:
    form = StepsFormat(options, engine.codec)
    move = None
    if options.reuse_keys:
        inverse_frequencies(engine.loaded.model)
        move = engine.runner.move
    return Ready(partial(ParallelSteps, form=form, chunk=engine.chunk, move=move), prepare=form.prepare)


METHODS: dict[str, Method] = {
    "ar": Method(_autoregressive, NoOptions),
    "auto": Method(_auto, AutoOptions),
    "fastcot": Method(_fastcot, FastCoTOptions),
    "jacobi": Method(_jacobi, JacobiOptions),
    "lookahead": Method(_lookahead, LookaheadOptions),
    "mcsd": Method(_speculative, MCSDOptions),
    "pdos": Method(_pdos, PDOSOptions),
    "sd": Method(_speculative, SDOptions),
    "seed": Method(_seed, SEEDOptions),
}
"""The decoding methods by name: how each is set up, and its options."""


def make_drafter(draft: Any, engine: Engine, stack: ExitStack) -> Drafter:
    """A drafter for an engine's model, from what the option `draft` may be; what is opened for it the stack closes.

    None and "lookup" look up; "early-exit" or "early-exit:6" drafts with the target's first layers; other names, paths
    and model objects with that model, "trained" with the one that `tot train-draft` made for this target; several, in a
    list or with commas, each for texts that those before had nothing for. A drafter is itself, and whose it is closes
    it. Decoders of one engine share the draft models that they name. Warns of a draft that is slower than its target.
    Raises ModelError where the draft's tokens are not the target's.
    """
    if isinstance(draft, LookupDrafter | ModelDrafter | DrafterChain):
        return draft
    if isinstance(draft, str) and "," in draft:
        draft = [part.strip() for part in draft.split(",")]
    if isinstance(draft, list | tuple):
        return DrafterChain([make_drafter(part, engine, stack) for part in draft])
    if draft is None or draft == "lookup":
        return LookupDrafter()
    target = engine.loaded
    if isinstance(draft, str) and re.fullmatch(r"early-exit(:\d{1,4})?", draft):
        layers = draft.partition(":")[2]
        first = first_layers(target, int(layers) if layers else None)
        shallow = _model_drafter(first, engine, shared=engine.runner.native)
        stack.callback(shallow.close)
        return shallow
    if draft == "trained":
        draft = draft_folder(target.name)
        if not (draft / "config.json").exists():
            raise OptionError(f"no draft was trained for {target.name}: run `tot train-draft`, or give another draft")
    named = isinstance(draft, str | Path)
    if not named and not hasattr(draft, "config"):
        raise OptionError(
            f"draft={draft!r} is no model: give a name, a path, a model object, lookup, trained or early-exit:N"
        )
    load = partial(_load_drafter, draft, named, engine)
    if named:
        shared: ModelDrafter = stack.enter_context(engine.drafters.use(model_key(draft), load))
        return shared
    own = load()
    stack.callback(own.close)
    return own


def _load_drafter(draft: Any, named: bool, engine: Engine) -> ModelDrafter:
    target = engine.loaded
    loaded = load_model(
        draft,
        tokenizer=None if named else target.tokenizer,
        dtype=str(target.dtype).removeprefix("torch.") if named else "auto",
        device=str(target.device),
    )
    check_vocabulary(loaded.tokenizer, target.tokenizer)
    made = _model_drafter(loaded, engine, owned=named)
    warn_if_slow(loaded, made.runner, engine)
    return made


def _model_drafter(
    loaded: LoadedModel, engine: Engine, owned: bool = False, shared: NativeForward | None = None
) -> ModelDrafter:
    """With a store for as many tokens as the target has: whatever is admitted there has room here."""
    try:
        return ModelDrafter(loaded, engine.cache.capacity, engine.loaded.model.config.vocab_size, owned, shared)
    except OptionError as error:
        raise OptionError(f"no room for the draft's keys and values beside the target's: {error}") from None


class LocalDecoder:
    """One decoding method on one engine. Closing it closes the engine, unless the engine was given."""

    def __init__(self, name: str, engine: Engine, method: Ready, shared: ExitStack, owns_engine: bool) -> None:
        self.name = name
        self.engine = engine
        self._method: Ready | None = method
        self._shared = shared
        self._owns_engine = owns_engine
        self._handles: WeakSet[Handle] = WeakSet()

    @property
    def method(self) -> Ready:
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
    def choices(self) -> dict[Purpose, str]:
        """By purpose, what `auto` chose so far, in words; nothing for methods that choose nothing."""
        return self.method.choices()

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
    quantize: Quantization | None = ...,
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
    quantize: Quantization | None = None,
    **options: Any,
) -> LocalDecoder | RemoteDecoder:
    """A decoder by name, on a model of its own or on a shared `engine` (which then has its own model and budget).

    `model` is a name, a hub id, a folder, a GGUF file, or a model object (with `tokenizer`); `kv_budget` is in tokens
    or bytes ("1.5GiB"). `quantize` packs linear layers in eight bits: "int8" their weights alone, "int8-dynamic" what
    they are given as well, which is faster and coarser. With "openai" the model is a name that the server at `base_url`
    knows, and nothing is loaded here. Raises OptionError for an unknown method or option, ModelError for a model that
    can't be had.
    """
    if name in REMOTE:
        local = {"tokenizer": tokenizer, "engine": engine, "kv_budget": kv_budget, "quantize": quantize}
        local |= {"dtype": None if dtype == "auto" else dtype, "device": None if device == "auto" else device}
        for option, value in local.items():
            if value is not None:
                raise OptionError(f"{option} is for models that run here: leave it out, the server has its own")
        return open_remote(model, options)
    chosen = checked_options(name, options)
    if engine is not None and quantize is not None:
        raise OptionError(f"quantize={quantize} is for the engine that is shared: give it to the one who made that")
    with ExitStack() as stack:
        owned = engine is None
        if engine is None:
            close_models()
            loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device)
            engine = Engine(loaded, kv_budget, quantize=quantize, owned=isinstance(model, str | Path))
            stack.callback(engine.close)
        ready = METHODS[name].set_up(engine, chosen, stack)
        return LocalDecoder(name, engine, ready, stack.pop_all(), owned)


def checked_options(name: str, options: Mapping[str, Any]) -> BaseModel:
    """The options of a method that runs here. Raises OptionError for an unknown method or option."""
    method = METHODS.get(name)
    if method is None:
        raise OptionError(unknown("decoder", name, [*METHODS, *REMOTE]))
    try:
        return method.options(**options)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(method.options.model_fields) or "none"
        place = f", option {first['loc'][0]}" if first["loc"] else ""
        raise OptionError(f"decoder {name}{place}: {first['msg']} (its options: {known})") from None
