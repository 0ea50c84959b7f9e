"""`tot list`, `tot cache` and `--version`."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tot.registry import SEARCHES


def test_every_kind_is_listed_with_a_sentence_each(tot: Any) -> None:
    status, out, err = tot("list")
    assert (status, err) == (0, "")
    for name in ("tasks", "searches", "generators", "evaluators", "decoders"):
        assert f"\n{name}\n" in f"\n{out}"
    for name in ("gsm8k", "mcts", "continue", "logprob", "seed"):
        assert re.search(rf"^  {name} +\w.{{10,}}$", out, re.MULTILINE), name


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (("searches", "mcts"), r"  iterations=10 "),
        (("generators", "sample"), r"  temperature=0\.7 "),
        (("decoders", "sd"), r"  k=4 "),
        (("tasks", "game24"), r"Default search: best-first"),
    ],
)
def test_one_is_shown_with_its_options_and_defaults(tot: Any, asked: tuple[str, str], shown: str) -> None:
    status, out, _ = tot("list", *asked)
    assert status == 0
    assert out.startswith(f"{asked[1]}\n")
    assert re.search(shown, out)


def test_unknown_names_are_refused_with_the_nearest(tot: Any) -> None:
    assert "unknown kind 'search' (did you mean searches?)" in tot("list", "search")[2]
    assert "unknown search 'mtcs' (did you mean mcts?)" in tot("list", "searches", "mtcs")[2]


def test_a_part_that_cannot_be_imported_does_not_hide_the_others(tot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __get__(self, *_: object) -> str:
            raise ImportError("no module named x")

    monkeypatch.setitem(SEARCHES._registered, "broken", type("Part", (), {"options": Broken()})())
    out = tot("list", "searches")[1]
    assert re.search(r"^  broken +cannot be imported \(ImportError: no module named x\)", out, re.MULTILINE)
    assert re.search(r"^  bfs +Breadth-first search", out, re.MULTILINE)


def test_the_cache_is_shown_and_emptied(tot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what tot made is deleted: the folder may be anybody's home."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TOT_CACHE", str(cache))
    assert tot("cache")[1].endswith(f"0.0 MiB  in {cache}\n")
    for name in ("models", "prefixes", "photos", "elsewhere"):
        (cache / name).mkdir(parents=True)
        (cache / name / "a.bin").write_bytes(bytes(3 * 2**20))
    (cache / "native").symlink_to(cache / "elsewhere")
    assert re.search(r"^ +3\.0 MiB  models: packed weights", tot("cache")[1], re.MULTILINE)
    assert re.search(r"^ +3\.0 MiB  prefixes: keys and values of prompts$", tot("cache")[1], re.MULTILINE)
    out = tot("cache", "--clear")[1]
    assert out.endswith(f"6.0 MiB  in {cache}\nDeleted.\n")
    assert sorted(path.name for path in cache.iterdir()) == ["elsewhere", "native", "photos"]
    assert (cache / "native" / "a.bin").exists()


def test_the_version_is_printed(tot: Any, python: Any) -> None:
    assert tot("--version")[:2] == (0, f"tot {version('tot')}\n")
    out, _ = python("-m", "tot", "--version").communicate(timeout=60)
    assert out == f"tot {version('tot')}\n"
    assert "Usage: tot" in tot("-h")[1]


def test_a_row_is_judged(tot: Any, scripted_model: Any, tmp_path: Path) -> None:
    (tmp_path / "named.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    solve = ("solve", "gsm8k", "--data", "named.jsonl", "--search", "cot")
    status, out, err = tot(*solve)
    assert (status, err) == (0, "")
    assert re.match(r"Answer.*: .+\n(Right|Wrong)\. Reference: 2\n", out)
    result = json.loads(tot(*solve, "--json")[1])
    assert (result["reference"], result["score"] in (0.0, 1.0)) == ("2", True)
