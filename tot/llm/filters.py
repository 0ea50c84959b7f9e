"""Filters: sampling filters (top_k, top_p, min_p) from the run, the model or the task."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.models.model_names import find_model
from tot.decoders.request import Sampling

log = logging.getLogger(__name__)
FILTERS = ("top_k", "top_p", "min_p")
_NOT_APPLIED = {"temperature": (0.7, 1.0), "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,)}
"""Other settings of a generation_config that change which tokens are sampled, with the values that change nothing."""


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


@functools.cache
def _warn_once(settings: str) -> None:
    advice = ": give --temperature to set it" if "temperature" in settings else ""
    log.warning("the model's generation_config sets %s, which is not applied%s", settings, advice)


def _file_filters(model: str | Path) -> dict[str, Any]:
    try:
        path = find_model(model)
        return dict(json.loads((path / "generation_config.json").read_text()))
    except (OSError, ValueError, TypeError, ModelError):  # no config or no model: loading the model reports it
        return {}
