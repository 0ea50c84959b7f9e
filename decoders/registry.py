"""Registry: parts of one kind by name. A name is one that an installed distribution declares, or path/to/file.py:Name.

Distributions declare names as entry points; nothing is imported before its name is asked for.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError, TaskError, unknown

_CHECKOUT = Path(__file__).resolve().parents[1] / "pyproject.toml"


class Registry(MutableMapping[str, Any]):
    """Parts of a kind ("search") that are declared in a group ("tot.searches"), and those put in."""

    def __init__(self, kind: str, group: str, parts: Mapping[str, Any] | None = None) -> None:
        self.kind = kind
        self.group = group
        self._put = dict(parts or {})

    def find(self, name: str, of: type = object) -> Any:
        """The part of that name, or `Name` in path/to/file.py, there a class of `of` where that is given.

        Raises OptionError that says which names there are, and TaskError for a file that can't be run.
        """
        path, colon, inside = name.rpartition(":")
        if colon and path.endswith(".py"):
            return self._in_file(Path(path), inside, of)
        if name.endswith(".py"):
            raise OptionError(f"{name}: name what is in it, as in {name}:Name")
        if name not in self:
            raise OptionError(f"{unknown(self.kind, name, self)}; or path/to/file.py:Name")
        return self[name]

    def _in_file(self, path: Path, name: str, of: type) -> Any:
        found = vars(_module(path))
        if of is object:
            there = {key: value for key, value in found.items() if not key.startswith("_")}
        else:
            classes = {key: value for key, value in found.items() if isinstance(value, type)}
            there = {key: value for key, value in classes.items() if issubclass(value, of) and value is not of}
        if name not in there:
            raise OptionError(unknown(f"{self.kind} in {path}", name, there))
        return there[name]

    def __getitem__(self, name: str) -> Any:
        return self._put[name] if name in self._put else declared(self.group)[name].load()

    def __setitem__(self, name: str, part: Any) -> None:
        self._put[name] = part

    def __delitem__(self, name: str) -> None:
        del self._put[name]

    def __contains__(self, name: object) -> bool:
        return name in self._put or name in declared(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*declared(self.group), *self._put}))

    def __len__(self) -> int:
        return len(list(iter(self)))


@cache
def declared(group: str) -> dict[str, EntryPoint]:
    """Entry points by name. A checkout declares for itself, however old what was installed of it is."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    if _CHECKOUT.is_file():
        project = tomllib.loads(_CHECKOUT.read_text(encoding="utf-8"))["project"]
        own = project["entry-points"].get(group, {}) if project["name"] == "tot" else {}
        found |= {name: EntryPoint(name, value, group) for name, value in own.items()}
    return found


def _module(path: Path) -> Any:
    """A Python file, which is run: it is the user's own program."""
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file; give path/to/file.py:Name")
    spec = importlib.util.spec_from_file_location(f"tot_parts_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where `inspect` looks for the file that a class is from
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        raise TaskError(f"{path} can't be run: {type(error).__name__}: {error}") from error
    return module
