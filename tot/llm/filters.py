"""Filters: which tokens may be sampled (top_k, top_p, min_p), from the run, the model or the task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.models.model_names import find_model
from tot.decoders.request import Sampling

FILTERS = ("top_k", "top_p", "min_p")


def filters_of(
    model: Any, given: Mapping[str, float | None], default: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The filters of a run by name: as given, otherwise as the model's generation_config says, otherwise a default.

    Args:
        model: A name or a path, whose files are read, a model object, or None for a model that runs elsewhere.

    Raises:
        OptionError: a value is out of range.
    """
    config = getattr(model, "generation_config", None)
    own = _of_files(model) if isinstance(model, str | Path) else {} if config is None else vars(config)
    sources = (given, own, default or {})
    chosen = {name: next((one[name] for one in sources if one.get(name) is not None), None) for name in FILTERS}
    said = {name: value for name, value in chosen.items() if value is not None}
    try:
        Sampling(**said)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        whose = "" if given.get(name) is not None else ", from the model's generation_config: give another"
        raise OptionError(f"{name}={first['input']!r}: {first['msg']}{whose}") from None
    return said


def _of_files(model: str | Path) -> dict[str, Any]:
    try:
        path = find_model(model)
        return dict(json.loads((path / "generation_config.json").read_text()))
    except (OSError, ValueError, TypeError, ModelError):  # none, or no model: it is said when that is loaded
        return {}
