"""`python -m benchmarks constraints` measures texts under a schema beside free texts of the same lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.benches
def test_both_sides_write_texts_of_the_same_lengths(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    options = ("--branches", "3", "--rounds", "2", "--max-tokens", "60", "--out", str(out))
    assert main(["constraints", "--model", str(small), *options]) == 0
    (cells,) = (value for value in json.loads(out.read_text()).values() if isinstance(value, list))
    assert len(cells) == 4
    for turn in range(2):
        constrained, free = (
            next(cell for cell in cells if (cell["side"], cell["round"]) == (side, turn))
            for side in ("tot, constrained", "tot, unconstrained")
        )
        assert constrained["tokens"] == free["tokens"] == free["forwards"]
        assert constrained["tokens"] - constrained["forced"] == constrained["forwards"]
        assert constrained["forced"] > 0 == free["forced"]
