"""The command `steps`: write made-up questions with right answers in steps, which `tot train pdos` makes texts of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.pdos_questions import documents, retrieval
from tot.cli.flags import writable


class Options(BaseModel):
    """Write made-up questions with answers in steps, for tot train pdos."""

    out: Path = Field(description="The .jsonl file to write.")
    questions: int = Field(200, ge=1, description="Number of questions.")


def run(asked: Options, _: Console) -> None:
    """Write the questions."""
    lines = [json.dumps(stepped_answer(i), ensure_ascii=False) + "\n" for i in range(asked.questions)]
    writable(asked.out).write_text("".join(lines), encoding="utf-8")


def stepped_answer(number: int) -> dict[str, Any]:
    """Return a row with `question`, `steps` ([title, text], ...) and `conclusion`, of four to eight steps.

    It differs from the questions of `python -m benchmarks pdos`, which have positive seeds.
    """
    chance = random.Random(f"steps 0 {number}")
    answered = chance.choice((retrieval, documents))(chance.choice(range(4, 9)), -chance.randrange(1, 10**9)).answered
    assert answered is not None
    steps = [[title, text] for title, text, _ in answered.steps]
    return {"question": answered.text, "steps": steps, "conclusion": answered.conclusion}
