"""What `tot bench decoders` shares among its sides, writes down as it goes, and says before it starts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tot.bench import decoders_generate
from tot.bench.decoders_generate import room_for_generate
from tot.bench.decoders_sides import Bench
from tot.decoders import LocalDecoder, Message


@pytest.fixture
def decoder(tiny: Callable[..., LocalDecoder]) -> Iterator[LocalDecoder]:
    with tiny() as decoder:
        yield decoder


@pytest.fixture
def bench(decoder: LocalDecoder, tmp_path: Path) -> Iterator[Bench]:
    """On a tiny model, with a copy of it for a draft."""
    decoder.model.save_pretrained(tmp_path / "draft")
    decoder.tokenizer.save_pretrained(tmp_path / "draft")
    options = {"draft": str(tmp_path / "draft")}
    console = Console(file=io.StringIO(), width=200)
    bench = Bench(decoder.engine, options, 2, 4, 1, console, tmp_path / "numbers.json")
    with bench.stack:
        yield bench


def said(bench: Bench) -> str:
    file: Any = bench.console.file
    return str(file.getvalue())


def test_all_sides_draft_with_one_model_and_none_finds_what_another_computed(bench: Bench) -> None:
    sides = [bench.side("one", "sd", k=2), bench.side("two", "mcsd", k_config=(2,))]
    assert sides[0].decoder.drafter is sides[1].decoder.drafter
    prompts = [[[(Message(role="user", content=f"Say {i}"),)]] for i in range(2)]
    stored = []
    draft: Any = sides[0].decoder.drafter
    forget = bench.forget

    def counted(drafter: Any) -> None:
        forget(drafter)
        stored.append(draft.runner.cache.stored)

    bench.forget = counted  # type: ignore[method-assign]
    bench.compare("both", sides, prompts, 1.0, against=(0,))
    assert stored == [0] * 4
    assert all(side.usage.drafted > 0 for side in sides)


def test_numbers_are_written_as_they_are_found(bench: Bench) -> None:
    bench.numbers["first"] = 1
    bench.show("a table")
    assert json.loads(bench.out.read_text())["first"] == 1
    assert "a table" in said(bench)


def test_a_comparison_without_room_is_left_out_and_that_is_said_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = bench.side("one", "sd").decoder.drafter
    assert room_for_generate(bench, drafter)
    assert said(bench) == ""
    weights = sum(weight.nbytes for weight in bench.engine.loaded.model.parameters())
    monkeypatch.setattr(decoders_generate, "free_memory", lambda device: 2 * weights)  # enough for one of the two
    assert not room_for_generate(bench, drafter)
    assert "GiB are free: the comparison with its generate is left out" in said(bench)
    assert room_for_generate(bench, None)
