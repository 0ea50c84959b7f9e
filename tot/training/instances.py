"""`tot instances`: generate distinct questions of a task, for training or evaluation."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from itertools import count as numbers
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError
from tot.decoders.files import writing
from tot.evaluation.data import rows
from tot.registry import load_task
from tot.report.terminal import counting
from tot.task.checked import CheckedTask


def make_instances(task_name: str, out: Path, count: int, seed: int, without: Sequence[Path]) -> None:
    """Write `count` distinct questions of a task to a .jsonl file, excluding the questions in the files `without`.

    Raises TaskError for a task that can't generate questions, and OptionError if it runs out of new ones.
    """
    task = CheckedTask(load_task(task_name))
    template = "chain" if "chain" in task.prompts else task.thought[0]

    def prompt(row: Any) -> Hashable:
        """Return the prompt of a row, because one question may be written in several ways."""
        return task.prompt(template, task.start(task.question_of(row)))

    seen = {prompt(row) for path in without for row in rows(path)}
    written, repeated = 0, 0
    with writing(out), out.open("w", encoding="utf-8") as file, counting("generating", count) as tell:
        for number in numbers():
            row = task.instance((seed << 32) + number)
            question = prompt(row)
            repeated = repeated + 1 if question in seen else 0
            if repeated > 1000:
                raise OptionError(f"{task_name} has hardly more than the {written} questions in {out}: lower the count")
            if not repeated:
                seen.add(question)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                written += 1
                tell(written, f"{written} questions")
            if written == count:
                return
