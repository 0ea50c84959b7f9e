"""`tot bench pdos`: questions with one answer, and both sides of each comparison on the same prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tot.bench.pdos import Question, question, run
from tot.decoders import OptionError


@pytest.mark.parametrize("people", [4, 10, 100])
def test_one_person_is_in_the_range(people: int) -> None:
    for seed in range(20):
        asked = question(people, seed)
        grades = dict(re.findall(r"^(\S+ \S+), .*GPA (\d\.\d\d)", asked.text, re.MULTILINE))
        low, high = map(float, re.findall(r"between (\d\.\d\d) and (\d\.\d\d)", asked.text)[0])
        assert tuple(grades) == asked.names
        assert len(set(asked.names)) == people
        assert [name for name, grade in grades.items() if low < float(grade) < high] == [asked.answer]
    assert question(people, 3) == question(people, 3) != question(people, 4)


@pytest.mark.parametrize("people", [3, 101])
def test_too_few_or_too_many_are_refused(people: int) -> None:
    with pytest.raises(OptionError, match=f"{people} people .* choose 4 to 100"):
        question(people, 0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### Ann Lee: no\n#### Bo Dar: yes\n####%%%\nName: Bo Dar", True),
        ("name: Ann Lee\nName: Bo Dar.", True),
        ("**Name**: Bo Dar", True),
        ("Name: Ann Lee", False),
        ("Name: Ann Lee or Bo Dar", False),
        ("It is Bo Dar", False),
        ("Name:\nBo Dar", False),
    ],
)
def test_an_answer_is_the_last_name_given(text: str, right: bool) -> None:
    assert Question("", ("Ann Lee", "Bo Dar"), "Bo Dar").is_answered_by(text) == right


def test_the_table_has_both_sides_of_each_comparison(tiny: Callable[[], Any], tmp_path: Path) -> None:
    decoder = tiny()
    decoder.close()
    decoder.model.config.max_position_embeddings = 16_384
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    out, screen = tmp_path / "numbers.json", StringIO()
    run(str(tmp_path / "model"), [4], 1, out, Console(file=screen, width=200))
    numbers = json.loads(out.read_text())
    sides = ["ar", "pdos, steps given", "ar, asked for a skeleton", "pdos, own skeleton"]
    assert [name for name in numbers if "people" in name] == [f"4 people: {side}" for side in sides]
    shown = screen.getvalue()
    assert all(side in shown for side in sides)
    given = numbers["4 people: pdos, steps given"]
    assert given["inside"]
    assert given["inside_ratio"] > 0
    assert given["format_kept"] is None
    assert numbers["4 people: ar"]["inside"] == []
    assert numbers["4 people: ar"]["ratio"] == 1.0
    for name in sides[:2]:
        (peak,) = numbers[f"4 people: {name}"]["peaks"]
        assert 0 < peak <= 1.02
