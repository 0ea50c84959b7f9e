"""The decoders of a search: opened from its models, on one engine for each local model; their prompts and filters."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from ml_dtypes import bfloat16
from pydantic import ValidationError

from tot.decoders.decoder import REMOTE, Decoder, LocalDecoder, checked_options, find_method, load_decoder
from tot.decoders.errors import ModelError, OptionError
from tot.decoders.methods.method import Method
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.model_names import find_model, has_chat_template, warn_of_no_template
from tot.decoders.models.shapes import HEAD
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.request import Purpose, Sampling
from tot.llm.models import Models
from tot.running import LOADING, in_daemon_thread

log = logging.getLogger(__name__)
FILTERS = ("top_k", "top_p", "min_p")
_NOT_APPLIED = {"temperature": (0.7, 1.0), "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,)}
"""Other settings of a generation_config that change which tokens are sampled, with the values that change nothing."""


def open_decoders(models: Models, stack: ExitStack) -> dict[Purpose, Decoder]:
    """Create the decoder of each purpose. Equal local models have one engine; `stack` closes engines and connections.

    Raises TotError if a model can't be loaded or an option is invalid.
    """
    given = models.by_purpose
    objects = {purpose: one for purpose, one in models.decoders.items() if not isinstance(one, str)}
    named = {purpose: one for purpose, one in given.items() if purpose not in objects and one.model is not None}
    different = [one for i, one in enumerate(named.values()) if one not in [*named.values()][:i]]
    local = [one for one in different if one.decoder not in REMOTE]
    for one in local:  # fail before torch and the models are loaded
        checked_options(str(one.decoder), one.options)
    for one in local:
        if isinstance(one.model, str | Path):
            find_model(one.model)
    sources = [{"model": one.model, **one.engine.model_dump(exclude_defaults=True)} for one in different]
    if local:
        from tot.decoders.engine.open_models import shared_engines

        engines = stack.enter_context(shared_engines([(one.model, one.tokenizer, one.engine) for one in local]))
        for one, engine in zip(local, engines, strict=True):
            sources[different.index(one)] = {"engine": engine}
    opened = [
        stack.enter_context(load_decoder(str(one.decoder), **source, **one.options))
        for one, source in zip(different, sources, strict=True)
    ]
    return {**objects, **{purpose: opened[different.index(one)] for purpose, one in named.items()}}


async def open_decoders_in_thread(models: Models, stack: ExitStack) -> dict[Purpose, Decoder]:
    """Open the decoders in a thread. If this is cancelled, nothing waits for a model, which is closed once loaded."""
    own = ExitStack()
    opening = in_daemon_thread(partial(open_decoders, models, own), LOADING)
    try:
        decoders = await asyncio.wrap_future(opening)
    except BaseException:
        opening.add_done_callback(lambda _: own.close())
        raise
    stack.enter_context(own)
    return decoders


def uses_chat_format(models: Models) -> bool:
    """Return whether the generating model uses a chat format and no decoding method needs few-shot prompts.

    Raises OptionError if the model of "escalate" differs in that: the prompts are the same for both.
    """
    purposes: tuple[Purpose, ...] = ("generate", "escalate")
    chats, large = (_chats(models, purpose) if purpose in models.by_purpose else None for purpose in purposes)
    if (chats or large) and _need_few_shot(models):
        return False
    if None not in (chats, large) and chats != large:
        raise OptionError(
            f"the model of {'generate' if large else 'escalate'} has no chat format, and the other has one: choose "
            "the prompts of both, --prompts papers or --prompts chat"
        )
    return bool(chats)


def _chats(models: Models, purpose: Purpose) -> bool | None:
    """Return whether a model uses a chat format; None if that is not known. Warns if it has no template."""
    decoder, given = models.decoders[purpose], models.by_purpose[purpose]
    if not isinstance(decoder, str):
        if getattr(getattr(decoder, "tokenizer", None), "chat_template", "") is None:
            warn_of_no_template()
        return getattr(decoder, "chats", None)
    if decoder in REMOTE:
        return RemoteDecoder.chats
    if given.model is None:
        return None
    try:
        if isinstance(given.model, str | Path):
            chats = has_chat_template(given.model)
        else:
            chats = getattr(given.tokenizer, "chat_template", None) is not None
    except (OSError, ModelError):  # loading the model reports it
        return None
    if not chats:
        warn_of_no_template()
    return chats


def _need_few_shot(models: Models) -> bool:
    """Return whether a decoding method needs few-shot prompts. Warns that they replace the model's chat prompts."""
    for decoder in models.decoders.values():
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


def filters_of(
    model: Any,
    given: Mapping[str, float | None],
    default: Mapping[str, float] | None = None,
    names: Sequence[str] = FILTERS,
) -> dict[str, float]:
    """Return the sampling filters of a run by name, or other fields of `Sampling`.

    Sources in order: `given`, the model's generation_config, `default`.

    Args:
        model: A name or path of model files, a model object, or None for a remote model.

    Raises:
        OptionError: a value is out of range.
    """
    config = getattr(model, "generation_config", None)
    own = _file_filters(model) if isinstance(model, str | Path) else {} if config is None else vars(config)
    changes = {name: own[name] for name, same in _NOT_APPLIED.items() if own.get(name) not in (None, *same)}
    if unused := [f"{name}={value}" for name, value in changes.items() if name not in names]:
        _warn_once(" and ".join(unused))
    sources = (given, own, default or {})
    chosen = {name: next((one[name] for one in sources if one.get(name) is not None), None) for name in names}
    filters = {name: value for name, value in chosen.items() if value is not None}
    try:
        Sampling(**filters)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        source = "" if given.get(name) is not None else ", from the model's generation_config: give another"
        raise OptionError(f"{name}={first['input']!r}: {first['msg']}{source}") from None
    return filters


@cache
def _warn_once(settings: str) -> None:
    advice = ": give --temperature to set it" if "temperature" in settings else ""
    log.warning("the model's generation_config sets %s, which is not applied%s", settings, advice)


def _file_filters(model: str | Path) -> dict[str, Any]:
    try:
        path = find_model(model)
        return dict(json.loads((path / "generation_config.json").read_text()))
    except (OSError, ValueError, TypeError, ModelError):  # no config or no model: loading the model reports it
        return {}


def family_of(model: LoadedModel | None) -> str | None:
    """Return a model's `model_type` and billions of parameters, which fine-tuned versions share; None if not local.

    The output head does not count, because files of one model differ in whether they repeat the embeddings in it.
    """
    if model is None:
        return None
    size = sum(math.prod(shape) for name, shape in model.weights.shapes.items() if name != HEAD)
    return f"{model.config.model_type}-{size / 1e9:.1f}b"


def identity_of(model: LoadedModel | None) -> str | None:
    """Return the family of a model and a checksum of its last norm; None without a local model or such a norm.

    Quantized versions share it, because norms are not quantized. Full fine-tuning changes it; LoRA adapters don't.
    """
    if model is None or (norm := "model.norm.weight") not in model.weights:
        return None
    return f"{family_of(model)}-{zlib.crc32(model.weights.first(norm).astype(bfloat16).tobytes()):08x}"
