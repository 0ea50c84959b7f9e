"""Model: a language model with its decoder and its engine. Models: the model of each purpose of a search."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from tot.decoders.decoder import METHODS, REMOTE, Decoder, LocalDecoder, find_decoder, find_method
from tot.decoders.errors import OptionError, unknown, validated
from tot.decoders.methods.method import Method
from tot.decoders.models.engine_options import EngineOptions
from tot.decoders.registry import split_spec
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Completion, Message, Purpose, Request, Usage, before_stop
from tot.task.checked import user_code

ALWAYS: tuple[Purpose, ...] = ("generate", "evaluate", "answer")
"""The purposes of every search. "escalate" needs a model of its own."""


@dataclass(frozen=True)
class Model:
    """A language model, its decoder and its engine. Raises OptionError if the decoder is unknown or has its own model.

    A decoder object has its own model. A function gets the texts of the messages as one text, and returns the reply.
    """

    model: Any = "smollm2-135m"
    """A name (tot models), a hub id, a folder, a .gguf file, a loaded model, a function from text to text (plain or
    async), or None for no model. Named models stay loaded for the next call; `close_models()` frees them."""
    decoder: str | Decoder = "auto"
    """The name of a decoding method, "openai" for a server, path/to/file.py:Name, or a decoder object."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the decoding method or of the server: draft, k, base_url."""
    tokenizer: Any = None
    """The tokenizer of a loaded model."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    """Models with equal names and options share one engine."""

    def __post_init__(self) -> None:
        if isinstance(self.engine, Mapping):  # in a file
            object.__setattr__(self, "engine", validated(EngineOptions, self.engine, "engine"))
        if _is_function(self.model) and not isinstance(self.decoder, FunctionDecoder):
            if self.decoder != "auto":
                raise OptionError(
                    f"decoder={self.decoder} has no effect, because the model is a function: leave it out"
                )
            object.__setattr__(self, "decoder", FunctionDecoder(self.model))
        _check_decoder(self.decoder)
        given = [*self.options, *(["tokenizer"] if self.tokenizer is not None else [])]
        given += self.engine.model_dump(exclude_defaults=True)
        if given and not self.named:
            raise OptionError(f"{', '.join(given)}: a decoder object has its own model; leave these out")

    @property
    def named(self) -> bool:
        """Whether a decoding method or a server decodes; otherwise a decoder object or a user's decoder."""
        if not isinstance(self.decoder, str):
            return False
        return self.decoder in REMOTE or isinstance(find_decoder(split_spec(self.decoder, "decoder")[0]), Method)


def _check_decoder(decoder: Any) -> None:
    if isinstance(decoder, str):
        name, options = split_spec(decoder, "decoder")
        if ".py:" in decoder:
            return
        if name not in (*METHODS, *REMOTE):
            raise OptionError(unknown("decoder", decoder, (*METHODS, *REMOTE)))
        if options and (name in REMOTE or isinstance(find_decoder(name), Method)):
            given_as = " ".join(f"--decoder-option {option}={value}" for option, value in options.items())
            raise OptionError(f"decoder {decoder}: give the options of a decoding method as {given_as}")
    elif isinstance(decoder, type):
        raise OptionError(f"decoder={decoder.__name__} is a class: give an object of it, {decoder.__name__}(...)")
    elif not callable(getattr(decoder, "generate", None)):
        raise OptionError(
            f"decoder={decoder!r} has no method 'generate': give a name, such as ar, or an object whose "
            "generate(requests) returns a list of completions, request.sampling.n for each request"
        )


@dataclass(frozen=True)
class Models:
    """The models of a search by purpose: "generate", "evaluate", "answer", and "escalate" if there is a second one."""

    by_purpose: Mapping[Purpose, Model]

    @classmethod
    def of(cls, model: Any = "smollm2-135m", decoder: Any = None) -> Models:
        """Return the models for a Model, a name, an object, a function, or a mapping from purpose to these.

        A missing purpose uses the model of "generate". `decoder` replaces decoders: a name, an object, or a mapping.
        If it maps to objects only, the one of "generate" also serves the purposes without a model. Both may be text:
        "generate=seed,evaluate=ar". Raises OptionError for an unknown purpose and for a missing model.
        """
        if isinstance(model, Models) and decoder is None:
            return model
        own = by_purpose("model", model.by_purpose if isinstance(model, Models) else model)
        named: Collection[str] = () if own is None or isinstance(model, Models) else own.keys()
        if own is None or not own.keys() & set(ALWAYS):
            own = {**dict.fromkeys(ALWAYS, Model() if own else model), **(own or {})}
        chosen = by_purpose("decoder", decoder) or {}
        if decoder is not None and not chosen:
            both = "escalate" in own and isinstance(decoder, str) and ".py:" not in decoder
            chosen = dict.fromkeys(get_args(Purpose) if both else ALWAYS, decoder)
        objects = [one for purpose, one in chosen.items() if purpose != "escalate"]
        if not objects or any(isinstance(one, str) for one in objects):
            others = None
        else:  # objects alone serve all purposes
            others = chosen.get("generate", objects[0])
        models: dict[Purpose, Model] = {}
        for purpose in get_args(Purpose):
            always = purpose in ALWAYS
            source: Purpose = "generate" if always and purpose not in own else purpose
            given = own.get(source)
            new = chosen.get(purpose, others if always and purpose not in named else None)
            if new is not None and not isinstance(new, str) and not _is_function(given):
                models[purpose] = Model(decoder=new)
            elif source in own:
                model_given = _model_of(given)
                models[purpose] = model_given if new is None else replace(model_given, decoder=new)
            elif always:
                raise OptionError(f"no model is given for {purpose}: add one, such as generate=small.gguf")
            elif new is not None:
                raise OptionError(f"decoder escalate={new} has no model: add --escalate MODEL")
        return cls(models)

    def __getstate__(self) -> dict[str, Any]:
        return {"by_purpose": self.by_purpose}  # another process creates its own decoders

    @cached_property
    def decoders(self) -> dict[Purpose, str | Decoder]:
        """The decoder of each purpose: a name, or an object. A user's decoder is created once for all purposes."""
        names = {one.decoder for one in self.by_purpose.values() if isinstance(one.decoder, str)}
        created = {name: _instantiate(name) for name in names}
        return {
            purpose: created[one.decoder] if isinstance(one.decoder, str) else one.decoder
            for purpose, one in self.by_purpose.items()
        }

    @property
    def weights(self) -> dict[Purpose, Any]:
        """The local model, or its name, of each purpose that has one."""
        found: dict[Purpose, Any] = {}
        for purpose, decoder in self.decoders.items():
            if not is_remote(decoder):
                found[purpose] = self.by_purpose[purpose].model if isinstance(decoder, str) else _weights_of(decoder)
        return {purpose: model for purpose, model in found.items() if model is not None}

    def with_options(self, engine: Mapping[str, Any], options: Mapping[str, Any], tokenizer: Any = None) -> Models:
        """Return these models with options of their engines, and of the decoders that have them. Raises OptionError."""
        models = dict(self.by_purpose)
        named = {purpose: one for purpose, one in models.items() if one.named}
        local = {purpose: one for purpose, one in named.items() if one.decoder not in REMOTE} or named
        if not named:
            first, own = models["generate"].decoder, validated(EngineOptions, engine, "engine")
            Model(decoder=first, options=options, tokenizer=tokenizer, engine=own)  # raises OptionError
        for purpose, one in local.items():
            own = validated(EngineOptions, {**one.engine.model_dump(), **engine}, "engine")
            models[purpose] = replace(one, engine=own, tokenizer=one.tokenizer if tokenizer is None else tokenizer)
        for name, value in options.items():
            taking = [purpose for purpose, one in named.items() if name in option_names(one.decoder)]
            for purpose in taking or [*local][:1]:  # opening the decoder rejects an unknown option
                models[purpose] = replace(models[purpose], options={**models[purpose].options, name: value})
        return Models(models)

    def exact(self) -> Models:
        """Return these models in float32, with "ar" instead of "auto", whose choices depend on timing.

        Raises OptionError if another option contradicts that, or if a decoder is remote.
        """
        if any(map(is_remote, self.decoders.values())):
            raise OptionError(
                "reproducible runs need a local model in float32, but the decoder is remote: leave reproducible out, "
                "or use a decoder other than openai"
            )
        models = dict(self.by_purpose)
        for purpose, decoder in self.decoders.items():
            if not isinstance(decoder, str):
                model = decoder.engine.loaded if isinstance(decoder, LocalDecoder) else getattr(decoder, "model", None)
                dtype = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
                if dtype != "float32":
                    raise OptionError(f"reproducible runs compute in float32, but this decoder's model is in {dtype}")
                continue
            engine = models[purpose].engine
            if engine.dtype not in ("auto", "fp32"):
                raise OptionError(f"reproducible runs compute in float32: leave dtype={engine.dtype!r} out")
            if engine.quantize not in ("auto", "none"):
                raise OptionError(f"reproducible runs compute in float32: leave quantize={engine.quantize!r} out")
            exact = engine.model_copy(update={"dtype": "fp32"})
            models[purpose] = replace(models[purpose], decoder="ar" if decoder == "auto" else decoder, engine=exact)
        return Models(models)


def _model_of(given: Any) -> Model:
    if isinstance(given, Mapping):
        return Model(**given)
    return given if isinstance(given, Model) else Model(None if given == "none" else given)


def by_purpose(option: str, given: Any) -> dict[Purpose, Any] | None:
    """Return values by purpose from a mapping or from "generate=seed,evaluate=ar"; None if it is one value for all.

    Raises OptionError for an unknown purpose, naming the option if the text can't be read.
    """
    if isinstance(given, str) and re.match(r"\s*\w+=", given) and not os.path.exists(given):  # noqa: PTH110
        start = "|".join(get_args(Purpose)) if ":" in given else r"\w+"  # a decoder may have options
        pairs = [pair.partition("=") for pair in re.split(rf",(?=\s*(?:{start})=)", given)]
        if not all(name for _, _, name in pairs):
            raise OptionError(f"--{option} {given!r} can't be read: write generate=NAME,evaluate=NAME")
        given = {purpose.strip(): name.strip() for purpose, _, name in pairs}
    if not isinstance(given, Mapping):
        return None
    for purpose in given:
        if purpose not in get_args(Purpose):
            raise OptionError(unknown("purpose", str(purpose), get_args(Purpose)))
    return dict(given)


def option_names(decoder: Any) -> set[str]:
    """Return the names of the options of a decoding method, or of "openai"."""
    return set(RemoteOptions.model_fields if decoder in REMOTE else find_method(decoder).options.model_fields)


def is_remote(decoder: str | Decoder) -> bool:
    return decoder in REMOTE if isinstance(decoder, str) else isinstance(decoder, RemoteDecoder)


def value_text(value: Any) -> str:
    """Return a model, a decoder or an option as text: names unchanged, other objects by class, "none" for None."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return (
        str(value) if isinstance(value, str | Path | int | float) else "none" if value is None else type(value).__name__
    )


def _weights_of(decoder: Any) -> Any:
    """Return the model of a decoder object, or its name if the engine runs without a transformers module."""
    if isinstance(decoder, LocalDecoder) and decoder.engine.loaded.module is None:
        return decoder.engine.loaded.name
    return getattr(decoder, "model", None)


def _instantiate(decoder: str) -> str | Decoder:
    """Create the user's decoder object that a name refers to. Names of decoding methods are returned unchanged."""
    name, options = split_spec(decoder, "decoder")
    if decoder in REMOTE or isinstance(factory := find_decoder(name), Method):
        return decoder
    if options and not isinstance(factory, type):
        raise OptionError(f"decoder {name} is an object and has no options: leave {', '.join(options)} out")
    with user_code(f"decoder {name}"):
        instance: Decoder = factory(**options) if isinstance(factory, type) else factory
    if not callable(getattr(instance, "generate", None)):
        raise OptionError(f"decoder {name} has no method 'generate': give a class with this method")
    return instance


def _is_function(model: Any) -> bool:
    """Return whether a model is a function from text to text: a model of transformers is callable, too."""
    return callable(model) and not isinstance(model, type) and not hasattr(model, "generate")


class FunctionDecoder:
    """Calls a function, which may be a coroutine function, with the texts of the messages as one text."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function = function

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return n completions for each request. The samples of a coroutine function run concurrently."""
        prompts = [(_joined(one), one) for one in requests for _ in range(one.sampling.n)]
        results = [self._function(text) for text, _ in prompts]
        if any(map(inspect.isawaitable, results)):
            results = asyncio.run(_gathered(results))
        return [_completion(text, one) for text, (_, one) in zip(results, prompts, strict=True)]


async def _gathered(results: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*results))


def _joined(request: Request) -> str:
    messages = [one.content if isinstance(one, Message) else str(one) for one in request.prompt]
    return request.prompt if isinstance(request.prompt, str) else "\n\n".join(messages)


def _completion(text: Any, request: Request) -> Completion:
    stops = () if request.sampling.keep_stop or not isinstance(text, str) else request.sampling.stop
    short = before_stop(text, stops) if stops else text
    return Completion(short, (), 0.0, "eos" if short == text else "stop", Usage())
