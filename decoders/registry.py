"""Registry of parts by name. A name is declared by an installed distribution, or is path/to/file.py:Name.

Distributions declare names as entry points. A part is imported at first use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterator, MutableMapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError, TaskError, describe, unknown

_CHECKOUT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_SPEC = re.compile(r"\s*(?P<name>.*?\.py\s*:[^:]*|[^:]*)(?::(?P<options>.*))?", re.DOTALL)


def split_spec(spec: str, kind: str) -> tuple[str, dict[str, str | None]]:
    """Return the name and the options in a text such as "mcts:iterations=20". Raises OptionError for other texts."""
    split = _SPEC.fullmatch(spec)
    assert split is not None  # any text before the first colon is a name
    name, given = split["name"].strip(), {}
    for pair in filter(None, (split["options"] or "").split(",")):
        option, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals:
            raise OptionError(f"{kind} {spec!r}: {pair!r} is not an option: write {name}:option=value,option=value")
        given[option] = None if value.lower() == "none" and option != "rollout" else value
    return name, given


class Registry(MutableMapping[str, Any]):
    """Parts of a kind ("search"): entry points of a group ("tot.searches"), and registered parts."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._registered: dict[str, Any] = {}

    def find(self, name: str, of: type = object) -> Any:
        """Return the part of that name, or `Name` in path/to/file.py, which must be a subclass of `of` if given.

        Raises OptionError that lists the valid names, and TaskError for a file that can't be run.
        """
        path, colon, member = name.rpartition(":")
        if colon and path.endswith(".py"):
            return self._in_file(Path(path), member, of)
        if name.endswith(".py"):
            raise OptionError(f"{name}: add a name in the file, as in {name}:Name")
        if name not in self:
            raise OptionError(f"{unknown(self.kind, name, self)}; or path/to/file.py:Name")
        return self[name]

    def name_of(self, part: Any) -> str | None:
        """Return the name of a class of this kind, or None if it has none."""
        value = f"{part.__module__}:{part.__qualname__}"
        names = [name for name, one in self._registered.items() if one is part]
        names += [name for name, entry in declared(self.group).items() if entry.value == value]
        return next(iter(names), None)

    def _in_file(self, path: Path, name: str, of: type) -> Any:
        members = vars(_module(path))
        if of is object:
            parts = {key: value for key, value in members.items() if not key.startswith("_")}
        else:
            classes = {key: value for key, value in members.items() if isinstance(value, type)}
            parts = {key: value for key, value in classes.items() if issubclass(value, of) and value is not of}
        if name not in parts:
            raise OptionError(unknown(f"{self.kind} in {path}", name, parts))
        return parts[name]

    def __getitem__(self, name: str) -> Any:
        return self._registered[name] if name in self._registered else declared(self.group)[name].load()

    def __setitem__(self, name: str, part: Any) -> None:
        self._registered[name] = part

    def __delitem__(self, name: str) -> None:
        del self._registered[name]

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in declared(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*declared(self.group), *self._registered}))

    def __len__(self) -> int:
        return len(list(iter(self)))


@cache
def declared(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. A checkout's pyproject.toml overrides the installed metadata."""
    installed, own = _all_declared()
    entries = {entry.name: entry for entry in installed.select(group=group)}
    return entries | {name: EntryPoint(name, value, group) for name, value in own.get(group, {}).items()}


@cache
def _all_declared() -> tuple[Any, dict[str, dict[str, str]]]:
    """Return the entry points of all distributions, and a checkout's own ones by group and name."""
    own: dict[str, dict[str, str]] = {}
    if _CHECKOUT.is_file():
        project = tomllib.loads(_CHECKOUT.read_text(encoding="utf-8"))["project"]
        own = project["entry-points"] if project["name"] == "tot" else {}
    return entry_points(), own


def _module(path: Path) -> Any:
    """Run a Python file of the user, and return its module."""
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file; give path/to/file.py:Name")
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]  # files in two folders may have one name
    spec = importlib.util.spec_from_file_location(f"tot_parts_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `inspect` needs it to find the file of a class
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file can raise anything
        raise TaskError(f"{path} can't be run: {describe(error)}") from error
    return module
