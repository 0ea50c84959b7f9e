"""Filters: sampling filters (top_k, top_p, min_p) from the run, the model or the task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.models.model_names import find_model
from tot.decoders.request import Sampling

FILTERS = ("top_k", "top_p", "min_p")


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


def _file_filters(model: str | Path) -> dict[str, Any]:
    try:
        path = find_model(model)
        return dict(json.loads((path / "generation_config.json").read_text()))
    except (OSError, ValueError, TypeError, ModelError):  # no config or no model: loading the model reports it
        return {}
