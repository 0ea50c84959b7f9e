"""The command `steps`: write made-up questions with right answers in steps, which `tot train pdos` makes texts of."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.pdos_questions import documents, retrieval
from tot.cli.flags import writable

_SIZES = range(4, 9)
"""Steps of a question."""


class Options(BaseModel):
    """Write made-up questions with answers in steps, for tot train pdos."""

    out: Path = Field(description="The .jsonl file to write.")
    questions: int = Field(200, ge=1, description="Number of questions.")


def run(asked: Options, _: Console) -> None:
    """Write the questions."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in stepped_answers(asked.questions)]
    writable(asked.out).write_text("".join(lines), encoding="utf-8")


def stepped_answers(questions: int) -> Iterator[dict[str, Any]]:
    """Yield rows with `question`, `steps` ([title, text], ...) and `conclusion`.

    The questions differ from the ones of `python -m benchmarks pdos`, which have positive seeds.
    """
    for number in range(questions):
        chance = random.Random(f"steps 0 {number}")
        answered = chance.choice((retrieval, documents))(chance.choice(_SIZES), -chance.randrange(1, 10**9)).answered
        assert answered is not None
        steps = [[title, text] for title, text, _ in answered.steps]
        yield {"question": answered.text, "steps": steps, "conclusion": answered.conclusion}
