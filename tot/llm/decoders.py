"""The decoders of a run: one for each purpose, from names or objects; named ones share one engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from tot.decoders.decoder import (
    METHODS,
    REMOTE,
    Decoder,
    checked_options,
    find_decoder,
    find_method,
    load_decoder,
)
from tot.decoders.errors import OptionError, unknown
from tot.decoders.methods.method import Method
from tot.decoders.models.model_names import find_model
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Purpose
from tot.task.checked import user_code

OF_ENGINE = ("tokenizer", "dtype", "device", "kv_budget", "quantize", "threads", "prefix_cache")
"""Options of the engine, common to all decoders."""


def decoders_by_purpose(given: Any) -> dict[Purpose, str | Decoder]:
    """Return the decoder of each purpose from a name, an object, a mapping, or "generate=seed,evaluate=ar".

    Raises OptionError for an unknown purpose or decoder.
    """
    purposes: tuple[Purpose, ...] = get_args(Purpose)
    if isinstance(given, str) and "=" in given:
        given = _by_purpose(given)
    elif not isinstance(given, Mapping):
        given = dict.fromkeys(purposes, given)
    for purpose, one in given.items():
        if purpose not in purposes:
            raise OptionError(unknown("purpose", str(purpose), purposes))
        if isinstance(one, str) and ".py:" not in one and one not in (*METHODS, *REMOTE):
            raise OptionError(unknown("decoder", one, (*METHODS, *REMOTE)))
        if isinstance(one, type):
            raise OptionError(f"decoder={one.__name__} is a class: give an object of it, {one.__name__}(...)")
        if not isinstance(one, str) and not callable(getattr(one, "generate", None)):
            raise OptionError(
                f"decoder={one!r} has no method 'generate': give a name, such as ar, or an object whose "
                "generate(requests) returns a list of completions, request.sampling.n for each request"
            )
    if not given or any(isinstance(one, str) for one in given.values()):
        return {**dict.fromkeys(purposes, "auto"), **given}
    return {**dict.fromkeys(purposes, given.get("generate", next(iter(given.values())))), **given}


def open_decoders(
    model: Any,
    decoders: Mapping[Purpose, str | Decoder],
    options: Mapping[str, Any],
    fields: Collection[str],
    stack: ExitStack,
) -> dict[Purpose, Decoder]:
    """Create the decoder of each purpose. Named decoders share one engine; `stack` closes it and all connections.

    `options` belong to the engine and the decoders; errors about unknown ones also list `fields`. Raises TotError
    if the model can't be loaded or an option is invalid.
    """
    chosen = {purpose: instantiate(one) for purpose, one in decoders.items()}
    names = {purpose: one for purpose, one in chosen.items() if isinstance(one, str)}
    objects = {purpose: one for purpose, one in chosen.items() if not isinstance(one, str)}
    if options and not names:
        raise OptionError(f"{', '.join(options)}: a decoder object has its own model; leave these out")
    if model is None and options:
        known = {*OF_ENGINE, *(option for name in names.values() for option in _options_of(name))}
        if other := [option for option in options if option not in known]:  # a file may contain options for a model
            raise OptionError(unknown("option", other[0], {*fields, *known}))
    if model is None or not names:
        return objects
    first, *others = sorted(dict.fromkeys(names.values()), key=lambda name: name in REMOTE)
    own = {name: _options_of(name) for name in (first, *others)}
    # The first decoder also gets options that no decoder has, and rejects unknown ones.
    common = {option: value for option, value in options.items() if not any(option in own[name] for name in others)}
    source: dict[str, Any] = {"model": model}
    arguments = common | _of(own[first], options)
    if first not in REMOTE:
        shared = {option: arguments.pop(option) for option in OF_ENGINE if option in arguments}
        checked_options(first, arguments)  # fail before torch and the model are loaded
        if isinstance(model, str | Path):
            find_model(model)
        from tot.decoders.engine.open_models import shared_engine

        source = {"engine": stack.enter_context(shared_engine(model, **shared))}
    opened: dict[str, Any] = {first: stack.enter_context(load_decoder(first, **source, **arguments))}
    for name in others:
        source = {"model": model} if name in REMOTE else {"engine": opened[first].engine}
        opened[name] = stack.enter_context(load_decoder(name, **source, **_of(own[name], options)))
    return {**objects, **{purpose: opened[name] for purpose, name in names.items()}}


def _by_purpose(text: str) -> dict[str, str]:
    """Parse decoders by purpose from "generate=seed,evaluate=ar". Raises OptionError."""
    given = [pair.partition("=") for pair in text.split(",")]
    if not all(equals and name for _, equals, name in given):
        raise OptionError(f"--decoder {text!r} can't be read: write generate=NAME,evaluate=NAME")
    return {purpose.strip(): name.strip() for purpose, _, name in given}


def is_remote(decoder: str | Decoder) -> bool:
    return decoder in REMOTE if isinstance(decoder, str) else isinstance(decoder, RemoteDecoder)


def instantiate(decoder: str | Decoder) -> str | Decoder:
    """Create the user's decoder object that a name refers to. Names of decoding methods are returned unchanged."""
    if not isinstance(decoder, str) or decoder in REMOTE or isinstance(factory := find_decoder(decoder), Method):
        return decoder
    with user_code(f"decoder {decoder}"):
        instance: Decoder = factory() if isinstance(factory, type) else factory
    if not callable(getattr(instance, "generate", None)):
        raise OptionError(f"decoder {decoder} has no method 'generate': give a class with this method")
    return instance


def _options_of(name: str) -> set[str]:
    return set(RemoteOptions.model_fields if name in REMOTE else find_method(name).options.model_fields)


def _of(names: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}
