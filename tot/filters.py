"""Which tokens may be drawn: what the run says of top-k, top-p and min-p, else what the model's own settings say.

A model's publisher sets them in its generation_config. Temperatures are the generators' and evaluators' own.
"""

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


def filters_of(model: Any, given: Mapping[str, float | None]) -> dict[str, float]:
    """The filters of a run by name: those given, and for the others the model's own.

    `model` is a name or a path, whose files are read, a model object, or None for none here. Raises OptionError for a
    value that can't be taken.
    """
    own = {} if model is None else _of_files(model) if isinstance(model, str | Path) else _of_object(model)
    chosen = {name: own.get(name) if given.get(name) is None else given[name] for name in FILTERS}
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


def _of_object(model: Any) -> dict[str, Any]:
    config = getattr(model, "generation_config", None)
    return {name: getattr(config, name, None) for name in FILTERS}
