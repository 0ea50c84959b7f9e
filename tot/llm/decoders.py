"""The decoders of a run: one for each purpose, from names or objects, on one engine for each local model."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from tot.decoders.decoder import (
    METHODS,
    REMOTE,
    Decoder,
    LocalDecoder,
    checked_options,
    find_decoder,
    find_method,
    load_decoder,
)
from tot.decoders.errors import ModelError, OptionError, unknown
from tot.decoders.methods.method import Method
from tot.decoders.models.model_names import find_model, has_chat_template, warn_of_no_template
from tot.decoders.registry import split_spec
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Purpose
from tot.llm.function import FunctionDecoder, is_function
from tot.task.checked import user_code

log = logging.getLogger(__name__)
OF_ENGINE = ("tokenizer", "dtype", "device", "kv_budget", "quantize", "threads", "prefix_cache")
"""Options of the engine, common to all decoders."""
_ALWAYS: tuple[Purpose, ...] = ("generate", "evaluate", "answer")
"""The purposes of every search. "escalate" needs a model or a decoder of its own."""


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


def first_and_escalate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with models spelled as `model` and `escalate`, without purpose=model pairs and "none".

    Functions become decoders. Raises OptionError for contradictory models.
    """
    fields = dict(given)
    if (named := by_purpose("model", fields.get("model"))) is not None:
        if "escalate" in named:
            large = named.pop("escalate")
            if fields.get("escalate") not in (None, large):
                raise OptionError(f"escalate is {large!r} in model, and {fields['escalate']!r}: give one of them")
            fields["escalate"] = large
        fields["model"] = {purpose: None if one == "none" else one for purpose, one in named.items()}
        if not named:
            del fields["model"]
    _functions_to_decoders(fields)
    return {name: None if name in ("model", "escalate") and one == "none" else one for name, one in fields.items()}


def _functions_to_decoders(fields: dict[str, Any]) -> None:
    """Replace functions among the models of some options by decoders."""
    model = fields.get("model")
    models = dict(model) if isinstance(model, Mapping) else dict.fromkeys(_ALWAYS, model)
    models["escalate"] = fields.get("escalate")
    functions: dict[str, Any] = {purpose: one for purpose, one in models.items() if is_function(one)}
    if not functions:
        return
    decoders = by_purpose("decoder", fields.get("decoder"))
    if decoders is None and fields.get("decoder") is not None:
        raise OptionError(f"decoder={fields['decoder']} has no effect, because the model is a function: leave it out")
    made = {one: FunctionDecoder(one) for one in functions.values()}
    fields["decoder"] = {**(decoders or {}), **{purpose: made[one] for purpose, one in functions.items()}}
    for name in ("model", "escalate"):
        if is_function(fields.get(name)):
            del fields[name]
    if isinstance(model, Mapping):
        fields["model"] = {purpose: one for purpose, one in model.items() if purpose not in functions}
        if not fields["model"]:
            del fields["model"]


def decoders_by_purpose(given: Any, escalates: bool = False) -> dict[Purpose, str | Decoder]:
    """Return the decoder of each purpose from a name, an object, a mapping, or "generate=seed,evaluate=ar".

    `escalates`: a model is given for the purpose "escalate". Raises OptionError for an unknown purpose or decoder.
    """
    named = by_purpose("decoder", given)
    if named is None:
        named = dict.fromkeys(_ALWAYS, given)
        if escalates and isinstance(given, str) and ".py:" not in given:
            named["escalate"] = given
    for one in named.values():
        if isinstance(one, str):
            name, options = split_spec(one, "decoder")
            if ".py:" not in one and name not in (*METHODS, *REMOTE):
                raise OptionError(unknown("decoder", one, (*METHODS, *REMOTE)))
            if options and (name in REMOTE or isinstance(find_decoder(name), Method)):
                given_as = " ".join(f"--decoder-option {option}={value}" for option, value in options.items())
                raise OptionError(f"decoder {one}: give the options of a decoding method as {given_as}")
        if isinstance(one, type):
            raise OptionError(f"decoder={one.__name__} is a class: give an object of it, {one.__name__}(...)")
        if not isinstance(one, str) and not callable(getattr(one, "generate", None)):
            raise OptionError(
                f"decoder={one!r} has no method 'generate': give a name, such as ar, or an object whose "
                "generate(requests) returns a list of completions, request.sampling.n for each request"
            )
    if isinstance(named.get("escalate"), str) and not escalates:
        raise OptionError(f"decoder escalate={named['escalate']} has no model: add --escalate MODEL")
    own = [one for purpose, one in named.items() if purpose != "escalate"]
    only_objects = own and not any(isinstance(one, str) for one in own)
    others: str | Decoder = named.get("generate", own[0]) if only_objects else "auto"
    return {**dict.fromkeys(_ALWAYS, others), **({"escalate": "auto"} if escalates else {}), **named}


def models_by_purpose(decoders: Mapping[Purpose, str | Decoder], model: Any, escalate: Any) -> dict[Purpose, Any]:
    """Return the model of each purpose with a named decoder. `model` is one for all, or a mapping from purpose.

    A purpose that is missing in the mapping uses the model of "generate". Raises OptionError if that is missing, too.
    """
    own = {**(model if isinstance(model, Mapping) else dict.fromkeys(_ALWAYS, model)), "escalate": escalate}
    found: dict[Purpose, Any] = {}
    for purpose, decoder in decoders.items():
        if isinstance(decoder, str):
            if purpose not in own and "generate" not in own:
                raise OptionError(f"no model is given for {purpose}: add one, such as generate=small.gguf")
            found[purpose] = own[purpose] if purpose in own else own["generate"]
        elif purpose == "escalate" and escalate is not None:
            raise OptionError(
                f"escalate={escalate} has no effect, because its decoder has its own model: leave one of them out, or "
                "add --decoder escalate=auto"
            )
    return found


def open_decoders(
    decoders: Mapping[Purpose, str | Decoder],
    models: Mapping[Purpose, Any],
    options: Mapping[str, Any],
    fields: Collection[str],
    stack: ExitStack,
) -> dict[Purpose, Decoder]:
    """Create the decoder of each purpose. Each local model has one engine; `stack` closes all engines and connections.

    `options` belong to the engines and the decoders; errors about unknown ones also list `fields`. Raises TotError
    if a model can't be loaded or an option is invalid.
    """
    names = {purpose: one for purpose, one in decoders.items() if isinstance(one, str)}
    objects = {purpose: one for purpose, one in decoders.items() if not isinstance(one, str)}
    own = {name: _options_of(name) for name in sorted(set(names.values()), key=lambda name: (name in REMOTE, name))}
    known = {*fields, *OF_ENGINE, *chain(*own.values())}
    for name in sorted(options.keys() - known):
        if not names or difflib.get_close_matches(name, fields, n=1):  # a mistyped option of the search
            raise OptionError(unknown("option", name, known))
    if options and not names:
        raise OptionError(f"{', '.join(options)}: a decoder object has its own model; leave these out")
    needed = {purpose: (name, models[purpose]) for purpose, name in names.items() if models[purpose] is not None}
    of_none = {name: value for name, value in options.items() if not any(name in known for known in own.values())}
    if not needed:
        if other := of_none.keys() - OF_ENGINE:  # a file may contain options for a model
            raise OptionError(unknown("option", min(other), known))
        return objects
    pairs = list(dict.fromkeys(needed.values()))
    local = list(dict.fromkeys(model for name, model in pairs if name not in REMOTE))
    shared = {option: of_none.pop(option) for option in OF_ENGINE if local and option in of_none}
    arguments = {name: {option: options[option] for option in options if option in own[name]} for name, _ in pairs}
    arguments[min(arguments, key=lambda name: name in REMOTE)] |= of_none  # this decoder rejects unknown options
    for name in arguments:  # fail before torch and the models are loaded
        if name not in REMOTE:
            checked_options(name, arguments[name])
    for model in local:
        if isinstance(model, str | Path):
            find_model(model)
    sources = {pair: {"model": pair[1]} for pair in pairs}
    if local:
        from tot.decoders.engine.open_models import shared_engines

        engines = stack.enter_context(shared_engines(local, **shared))
        by_model = dict(zip(local, engines, strict=True))
        sources |= {pair: {"engine": by_model[pair[1]]} for pair in pairs if pair[0] not in REMOTE}
    opened = {pair: stack.enter_context(load_decoder(pair[0], **sources[pair], **arguments[pair[0]])) for pair in pairs}
    return {**objects, **{purpose: opened[pair] for purpose, pair in needed.items()}}


def is_remote(decoder: str | Decoder) -> bool:
    return decoder in REMOTE if isinstance(decoder, str) else isinstance(decoder, RemoteDecoder)


def instantiate(decoder: str | Decoder) -> str | Decoder:
    """Create the user's decoder object that a name refers to. Names of decoding methods are returned unchanged."""
    if not isinstance(decoder, str) or decoder in REMOTE:
        return decoder
    name, options = split_spec(decoder, "decoder")
    if isinstance(factory := find_decoder(name), Method):
        return decoder
    if options and not isinstance(factory, type):
        raise OptionError(f"decoder {name} is an object and has no options: leave {', '.join(options)} out")
    with user_code(f"decoder {name}"):
        instance: Decoder = factory(**options) if isinstance(factory, type) else factory
    if not callable(getattr(instance, "generate", None)):
        raise OptionError(f"decoder {name} has no method 'generate': give a class with this method")
    return instance


def need_few_shot(decoders: Iterable[str | Decoder]) -> bool:
    """Return whether a decoding method needs few-shot prompts. Warns that they replace the model's chat prompts."""
    for decoder in decoders:
        method = find_method(decoder) if isinstance(decoder, str) and decoder not in REMOTE else decoder
        if isinstance(method, Method | LocalDecoder) and method.few_shot:
            _warn_of_few_shot(method.name if isinstance(method, LocalDecoder) else str(decoder))
            return True
    return False


@cache
def _warn_of_few_shot(name: str) -> None:
    """Warn once per process and decoder."""
    log.warning(
        "decoder %s needs few-shot prompts, which replace the model's chat prompts: set prompts='chat' or "
        "prompts='papers' to choose",
        name,
    )


def uses_chat_format(decoder: str | Decoder, model: Any, options: Mapping[str, Any]) -> bool | None:
    """Return whether a decoder's model uses a chat format; None if that is not known. Warns if it has no template."""
    if not isinstance(decoder, str):
        if getattr(getattr(decoder, "tokenizer", None), "chat_template", "") is None:
            warn_of_no_template()
        return getattr(decoder, "chats", None)
    if decoder in REMOTE:
        return RemoteDecoder.chats
    if model is None:
        return None
    try:
        if isinstance(model, str | Path):
            chats = has_chat_template(model)
        else:
            chats = getattr(options.get("tokenizer"), "chat_template", None) is not None
    except (OSError, ModelError):  # loading the model reports it
        return None
    if not chats:
        warn_of_no_template()
    return chats


def _options_of(name: str) -> set[str]:
    return set(RemoteOptions.model_fields if name in REMOTE else find_method(name).options.model_fields)
