"""Golden files: the trees of every built-in part with scripted replies, and the tokens of every decoding method.

`python -m tests.golden.record` writes the files again; `git diff tests/golden` then shows the differences. Only
public names are used, so that the files outlive changes inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.golden import tokens, trees

FOLDER = Path(__file__).parent
GROUPS = (*trees.GROUPS, "evaluate", *tokens.GROUPS)


def record(group: str, folder: Path) -> dict[str, Any]:
    """Return the contents of a golden file. Programs and results are written to `folder`."""
    if group in tokens.GROUPS:
        return tokens.record(group)
    return trees.evaluation(folder) if group == "evaluate" else trees.record(group, folder)


def as_text(golden: dict[str, Any]) -> str:
    return json.dumps(golden, indent=1, ensure_ascii=False) + "\n"


def written() -> Iterator[str]:
    """Write all golden files, and return their names."""
    for group in GROUPS:
        with TemporaryDirectory() as folder:
            (FOLDER / f"{group}.json").write_text(as_text(record(group, Path(folder))), encoding="utf-8")
        yield group


if __name__ == "__main__":
    list(written())
