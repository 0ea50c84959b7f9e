"""Read YAML files of users."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tot.decoders.errors import OptionError, reason
from tot.decoders.files import regular

_LONGEST = 100_000
"""Characters of a file of options."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package has no types
    """Refuses a name that occurs twice, of which PyYAML would read only the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for name, count in Counter(str(key.value) for key, _ in node.value).items():
            if count > 1 and name != "<<":
                raise yaml.YAMLError(f"{name} occurs {count} times")
        return dict(super().construct_mapping(node, deep))


def read_mapping(path: Path, example: str) -> dict[Any, Any]:
    """Read a YAML file of `name: value` lines, such as `example`. Raises OptionError for any other file."""
    try:
        text = regular(path).read_text(encoding="utf-8")
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text):,} characters, and options have at most {_LONGEST:,}")
        mapping = yaml.load(text, _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise OptionError(f"{path} can't be read as YAML: {reason(error)}") from None
    if not isinstance(mapping, dict):
        raise OptionError(f"{path} has no options: write lines such as `{example}`")
    return mapping
