"""The searches of a server, by name: the default ones, or the ones in a YAML file, validated at the start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tot.config import ModelFlags, SearchConfig
from tot.decoders.decoder import Decoder
from tot.decoders.errors import OptionError, TotError, unknown
from tot.sandbox import can_confine
from tot.search.calibration import calibrations_for
from tot.task.task import Task
from tot.yaml_files import read_mapping

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "vote": {"search": "auto"},
    "best": {"search": "best-of-n:samples=5", "evaluator": "likelihood"},
    "tree": {"search": "bfs:thoughts=2,breadth=4,select=all,aggregate=vote"},
    "code": {"task": "code"},
}
_OF_SERVER = {*ModelFlags.model_fields, "tokenizer"}
"""Options of the decoder, which all searches share."""


ServedSearch = tuple[Task, SearchConfig]


def load_searches(file: Path | None, decoder: Decoder, taken: tuple[str, ...] = ()) -> dict[str, ServedSearch]:
    """Return the searches of a file, or the default ones, by name; "" is a single sample.

    Args:
        file: A mapping from names to the task (`ask` by default) and options of `SearchConfig`.
        decoder: The decoder of all searches.
        taken: Names that are no names of searches.

    Raises:
        OptionError: The file can't be read, or a search is invalid. The message names the search and the field.
    """
    given = dict(_DEFAULTS) if file is None else _read(file)
    if file is None and not can_confine():
        del given["code"]
    for name in given:
        if name in taken:
            raise OptionError(f"{file}, search {name}: the name of a decoder: choose another name")
    given[""] = {"search": "cot"}
    return {name: _search(fields, decoder, f"{file}, search {name}") for name, fields in given.items()}


def _read(file: Path) -> dict[str, Any]:
    example = "vote: {task: gsm8k, until: 0.95}"
    given = read_mapping(file, example)
    for name, fields in given.items():
        if not isinstance(fields, dict):
            raise OptionError(f"{file}, search {name!r}: write its options, such as `{example}`")
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]{1,60}", name)):
            raise OptionError(f"{file}, search {name!r}: use letters, digits, dots and hyphens only")
    return given


def _search(fields: Mapping[str, Any], decoder: Decoder, place: str) -> ServedSearch:
    known = {"task", *SearchConfig.names()} - _OF_SERVER
    for field in map(str, fields):
        if field in _OF_SERVER:
            raise OptionError(f"{place}, field {field}: all searches share the server's decoder: set it for tot serve")
        if field not in known:
            raise OptionError(f"{place}: {unknown('field', field, known)}")
    options = {field: value for field, value in fields.items() if field != "task"}
    try:
        config = SearchConfig.of(None, {**options, "decoder": decoder}).exact()
        task = config.suited(fields.get("task", "ask"))
        config.parts(task)
        config.filters_for(task)
        calibrations_for(task, config.calibration)
    except TotError as error:
        raise OptionError(f"{place}: {error}") from None
    return task, config
