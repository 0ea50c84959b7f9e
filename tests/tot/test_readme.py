"""What the README tells a reader to run, runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tot import ThoughtTree
from tot.cli.app import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """The README's indented commands of a program, as words without comments and redirections."""
    joined = re.sub(r" \\\n +", " ", README)
    lines = re.findall(rf"^    ({program} .*)$", joined, re.MULTILINE)
    return [shlex.split(line.partition("<")[0], comments=True) for line in lines]


def test_its_first_commands_are_make_targets() -> None:
    block = README.partition("## A few commands")[2].partition("\n\n    ")[2].partition("\n\n")[0]
    words = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [word[0] for word in words] == ["make"] * 4
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for _, target in words:
        assert re.search(rf"^{target}:.*\n\t\S", makefile, re.MULTILINE)
        assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE)


def test_its_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    given = commands("tot")
    assert {command[1] for command in given} >= {"solve", "models"}
    for _, *words in given:
        name = words[:2] if words[0] in ("bench", "cllm", "fastcot") else words[:1]
        assert main([*name, "--help"]) == 0
        described = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"^ +{option}\b", described, re.MULTILINE), f"tot {' '.join(name)} has no {option}"


def test_the_layout_names_folders_that_exist() -> None:
    layout = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("\n    tot/")[2].partition("\nWho")[0]
    above, found = "tot", set()
    for depth, folder in re.findall(r"^( {4}| {6})(\w+)/", "    tot/" + layout, re.MULTILINE):
        above = folder if len(depth) == 4 else above
        found.add(folder if len(depth) == 4 else f"{above}/{folder}")
    assert {"tot", "decoders", "prompts", "tasks", "tot/search", "decoders/engine"} <= found
    assert all((ROOT / folder).is_dir() for folder in found)


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_its_search_driven_by_hand_prints_the_best_state(python: Any) -> None:
    out, err = python("-").communicate(examples()[1], timeout=60)
    assert (out, err) == ("2.0 ['b', 'b']\n", "")


@pytest.mark.real
def test_its_example_runs_as_pasted(smollm2: str, python: Any, tmp_path: Path) -> None:
    example, _ = examples()
    process = python("-")
    out, err = process.communicate(example, timeout=120)
    assert (process.returncode, err) == (0, "")
    assert re.search(r" (10|[1-9])\.\d+ Usage\(prompt_tokens=\d+, ", out)
    tree = ThoughtTree.load(tmp_path / "riddle.json")
    assert tree.state(tree.root).question in example
    thoughts = int(re.findall(r"BFS\(thoughts=(\d+)", example)[0])
    assert len(tree.children(tree.root)) == len(tree) - 1 == thoughts
