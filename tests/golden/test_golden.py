"""Every built-in part gives the recorded tree, and every decoding method the recorded tokens.

If a change is meant to differ, `python -m tests.golden.record` records it, and the commit names the reason.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tot.decoders import OptionError
from tot.decoders.registry import declared
from tot.sandbox import confines

sys.path.append(str(Path(__file__).parents[2]))
from tests.golden import tokens, trees
from tests.golden.record import FOLDER, GROUPS, record


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_as_recorded(group: str, tmp_path: Path) -> None:
    if group == "textworld" and not find_spec("textworld"):
        pytest.skip("needs textworld")
    if group == "programs":
        try:
            confines()
        except OptionError as error:
            if "CI" in os.environ:
                pytest.fail(str(error))
            pytest.skip(str(error))
    golden = json.loads((FOLDER / f"{group}.json").read_text(encoding="utf-8"))
    found = json.loads(json.dumps(record(group, tmp_path)))
    assert found.keys() == golden.keys()
    for name, expected in golden.items():
        assert found[name] == expected, f"{group}: {name}"


def test_every_built_in_part_is_recorded() -> None:
    runs = [run for group in trees.GROUPS.values() for run in group.values()]
    named = " ".join(f"{task} {options}" for task, _, _, options in runs)
    unnamed = {"measured"}  # of optimize by default
    for kind in ("searches", "generators", "evaluators", "tasks"):
        missing = [name for name in declared(f"tot.{kind}") if name not in named and name not in unnamed]
        assert not missing
    assert {method for method, _ in tokens.METHODS.values()} == {*tokens.ALL}
