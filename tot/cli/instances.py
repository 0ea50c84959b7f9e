"""`tot instances`: generate distinct questions of a task, for training or evaluation."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tot.decoders.errors import OptionError

if TYPE_CHECKING:
    from tot.task.task import Task


def instances_command(
    task: Annotated[str, typer.Argument(help="A task that can generate questions, such as blocksworld.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 0,
    without: Annotated[list[Path] | None, typer.Option(help="Exclude the questions of these files.")] = None,
) -> None:
    """Generate distinct questions of a task."""
    from tot.decoders.files import writing
    from tot.evaluation.data import rows
    from tot.report.terminal import counting

    excluded = [row for path in without or () for row in rows(path)]
    with writing(out), out.open("w", encoding="utf-8") as file, counting("generating", count) as tell:
        written = 0
        for row in islice(distinct_rows(task, seed, excluded), count):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
            tell(written, f"{written} questions")
        if written < count:
            raise OptionError(f"{task} has hardly more than the {written} questions in {out}: lower the count")


def distinct_rows(
    task: Task | type[Task] | str, seed: int = 0, excluded: list[Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield generated rows until 1,000 in a row repeat an earlier or excluded one."""
    from tot.registry import load_task
    from tot.task.checked import CheckedTask

    checked = CheckedTask(load_task(task))
    template = "chain" if "chain" in checked.prompts else checked.thought[0]

    def prompt(row: Any) -> Hashable:
        """Return the prompt of a row, because one question may be written in several ways."""
        return checked.prompt(template, checked.start(checked.question_of(row)))

    seen, repeated = {prompt(row) for row in excluded or ()}, 0
    for number in numbers():
        row = checked.instance((seed << 32) + number)
        if (question := prompt(row)) in seen:
            if (repeated := repeated + 1) > 1000:
                return
            continue
        seen.add(question)
        repeated = 0
        yield row
