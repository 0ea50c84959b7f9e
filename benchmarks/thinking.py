"""The benchmark `thinking`: right answers by the budget of the thinking, and what thinking saves once it is settled.

The model is taught the form of thinking first (see `benchmarks.taught`), or already thinks (`taught=0`). All sides
answer the same questions greedily. "cut" is a text that ends at the budget as it stands: its answer counts only if the
model closed its thinking by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import about
from benchmarks.harness import Bench, BenchOptions, Cells, Measured, timed
from benchmarks.rationales import Question
from benchmarks.taught import TAGS, questions, teach
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.request import Completion, ThinkingOptions
from tot.evaluation.estimate import estimate, paired

_BATCH = 16
"""Questions that are decoded together."""


class Options(BenchOptions):
    """Compare budgets of thinking, and thinking that ends once its answer is settled."""

    data: str = Field(description="Questions with answers, as for tot eval.")
    task: str = Field("gsm8k", description="The task of these questions.")
    folder: Path = Field(Path("taught"), description="The folder of the model that is taught to think.")
    taught: int = Field(300, ge=0, description="Number of first rows that teach it; 0: the model thinks.")
    limit: int = Field(200, ge=2, description="Number of rows after them to measure.")
    budgets: tuple[int, ...] = Field((64, 128, 256, 512), description="Comma-separated budgets, in tokens.")
    settle: tuple[float, ...] = Field((0.8, 0.9, 0.95), description="Comma-separated thresholds, at the last budget.")
    max_tokens: int = Field(128, ge=1, description="Maximum tokens of an answer.")
    hint: str = Field("**Final answer:**", description="The beginning of answers after thinking that was closed.")


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the tables."""
    model: Any = asked.model
    if asked.taught:
        teaching = questions(asked.task, asked.data, 0, asked.taught, 400)
        model = teach(asked.model, teaching, asked.folder, lambda text: console.print(text, style="dim"))
    rows = questions(asked.task, asked.data, asked.taught, asked.limit, asked.max_tokens)
    batches = [rows[at : at + _BATCH] for at in range(0, len(rows), _BATCH)]
    tags: Any = {"think_tags": TAGS} if asked.taught else {}
    *_, most = asked.budgets
    ways = {f"budget {budget}": ThinkingOptions(budget=budget, hint=asked.hint) for budget in asked.budgets}
    ways |= {
        f"settled, {value:g}": ThinkingOptions(budget=most, settle=value, hint=asked.hint) for value in asked.settle
    }
    with load_decoder("ar", model, prefix_cache=False, **tags) as decoder:
        bench = Bench(asked, console, f"{asked.model}; {about(decoder.engine)}")
        bench.compare(
            f"{asked.task}: {len(rows)} questions",
            {name: partial(_answered, decoder, thinking) for name, thinking in ways.items()},
            batches,
            partial(_table, f"budget {most}"),
        )


def _answered(decoder: LocalDecoder, thinking: ThinkingOptions, batch: Sequence[Question]) -> Measured:
    requests = [
        one.request.model_copy(update={"sampling": one.request.sampling.model_copy(update={"thinking": thinking})})
        for one in batch
    ]
    seconds, completions = timed(lambda: decoder.generate(requests))
    return {
        "seconds": seconds,
        "right": [one.score(one.answer(text)) for one, text in zip(batch, completions, strict=True)],
        "empty": sum(not text.text.strip() for text in completions),
        "closed": [any(part.kind == "closing" for part in text.parts) for text in completions],
        "thinking": [_thinking_tokens(text) for text in completions],
        "new": [text.usage.new_tokens for text in completions],
    }


def _thinking_tokens(text: Completion) -> int:
    return sum(part.tokens for part in text.parts if part.kind == "thinking")


def _table(whole: str, cells: Cells) -> Table:
    """Build a table of the sides; differences are paired with the side `whole`, the longest budget."""

    def joined(side: str, name: str) -> list[float]:
        return [float(value) for _, cell in sorted(cells.of(side).items()) for value in cell[name]]

    heads = ("right", "right if cut", "minus the longest", "thinking", "less", "all tokens", "closed", "empty")
    table = Table("", *heads, title=f"n = {len(joined(whole, 'right'))}")
    longest, most = joined(whole, "right"), fmean(joined(whole, "thinking"))
    for side in cells.sides:
        right, closed, thinking = (joined(side, name) for name in ("right", "closed", "thinking"))
        cut = [score * (not ended) for score, ended in zip(right, closed, strict=True)]
        loss = [score - other for score, other in zip(right, longest, strict=False)]
        table.add_row(
            side,
            estimate(right).format(".1%"),
            f"{fmean(cut):.1%}",
            "" if side == whole else paired(loss).format("+.1%"),
            f"{fmean(thinking):.0f}",
            f"{1 - fmean(thinking) / most:.0%}",
            f"{fmean(joined(side, 'new')):.0f}",
            f"{fmean(closed):.0%}",
            str(sum(cell["empty"] for cell in cells.of(side).values())),
        )
    return table
