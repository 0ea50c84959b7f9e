"""What `tot bench decoders` shares among its sides."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tot.bench import decoders
from tot.bench.decoders import Maker
from tot.bench.harness import Bench
from tot.bench.options import BenchOptions
from tot.decoders import LocalDecoder, Message

pytestmark = pytest.mark.benches


@pytest.fixture
def maker(tiny: Callable[..., LocalDecoder], tmp_path: Path) -> Iterator[Maker]:
    """On a tiny model, with a copy of it for a draft."""
    with tiny() as decoder, ExitStack() as stack:
        decoder.model.save_pretrained(tmp_path / "draft")
        decoder.tokenizer.save_pretrained(tmp_path / "draft")
        bench = Bench(BenchOptions(out=tmp_path / "n.json"), Console(file=io.StringIO(), width=200), "here")
        yield Maker(bench, decoder, {"draft": str(tmp_path / "draft")}, ["sd", "mcsd"], 2, 1, stack)


def test_all_sides_draft_with_one_model_and_none_finds_what_another_computed(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "NEW", 4)
    one, two = maker.decoder("sd", k=2), maker.decoder("mcsd", k_config=(2,))
    assert one.drafter is two.drafter
    sides = [maker.side("one", "sd", k=2), maker.side("two", "mcsd", True, k_config=(2,))]
    prompts = [[[(Message(role="user", content=f"Say {i}"),)]] for i in range(2)]
    stored = []
    draft: Any = one.drafter
    clear = draft.runner.cache.clear

    def cleared() -> None:
        clear()
        stored.append(draft.runner.cache.stored)

    monkeypatch.setattr(draft.runner.cache, "clear", cleared)
    maker.compare("both", sides, prompts, 1.0, against=[0])
    assert stored == [0] * 4
    assert maker.bench.out is not None
    cells = json.loads(maker.bench.out.read_text())["both"]["cells"]
    assert [(cell["side"], cell["tokens"]) for cell in cells] == [("one", 8), ("two", 8)]
    assert all(0 < cell["accepted"] <= cell["reached"] <= cell["drafted"] for cell in cells)
