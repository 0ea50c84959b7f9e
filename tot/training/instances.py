"""`tot instances`: questions that a task makes up, each only once, to train and to measure on."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from itertools import count as numbers
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError
from tot.evaluation.data import rows
from tot.registry import load_task
from tot.report.terminal import counting
from tot.task.checked import CheckedTask


def make_instances(task_name: str, out: Path, count: int, seed: int, without: Sequence[Path]) -> None:
    """Write so many different questions of a task to a .jsonl file, none of which is in the files `without`.

    Raises TaskError for a task that makes none up, OptionError where it has no more.
    """
    task = CheckedTask(load_task(task_name))
    template = task.chain if task.has_template(task.chain) else task.thought[0]

    def asked(row: Any) -> Hashable:
        """What a model is asked: questions may be written in several ways."""
        return task.prompt(template, task.start(task.question_of(row)))

    seen = {asked(row) for path in without for row in rows(path)}
    made, repeated = 0, 0
    with out.open("w", encoding="utf-8") as file, counting("making up", count) as tell:
        for number in numbers():
            row = task.instance((seed << 32) + number)
            question = asked(row)
            repeated = repeated + 1 if question in seen else 0
            if repeated > 1000:
                raise OptionError(f"{task_name} has hardly more than the {made} questions in {out}: ask for fewer")
            if not repeated:
                seen.add(question)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                made += 1
                tell(made, f"{made} questions")
            if made == count:
                return
