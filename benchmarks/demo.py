"""The command `demo`: one question, answered by the small model plainly and by a search, side by side."""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import BaseModel, Field
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from benchmarks.list_functions import ListFunctions
from tot.api import run_search
from tot.cli.instances import distinct_rows
from tot.cli.live_view import watched
from tot.config import SearchConfig
from tot.running import run_to_end

_CHOSEN = 3
"""The first of the 20 questions of seed 0 that one answer gets wrong and the search gets right."""


class Options(BaseModel):
    """Answer one question by one greedy answer and by a search, with the model that comes with tot."""

    number: int = Field(_CHOSEN, ge=1, le=20, description="Which of the 20 questions.")


def run(asked: Options, page: Console) -> None:
    """Print the answers of both sides."""
    number = asked.number
    row = next(islice(distinct_rows(ListFunctions), number - 1, None))
    task = ListFunctions()
    page.print(f"{row['question']}\n")
    table = Table("", "one answer", "search", expand=True, show_edge=False)
    table.columns[0].no_wrap = True
    columns: list[list[Any]] = []
    for search, name in (("cot", "one answer"), (task.search, "search")):
        with watched(row["question"], name) as view:
            config = SearchConfig.of(None, {"search": search, "max_tokens": 200, "reproducible": True})
            running = run_search(task, row["question"], config, watch=view.watch, keep_best=True)
            found = run_to_end(running)
        answer = str(found.answer or "no program")
        usage = found.usage
        columns.append(
            [
                Syntax(answer.strip(), "python", theme="ansi_light", word_wrap=True, background_color="default"),
                "all pass" if found.solved else "wrong",
                "right" if task.score(answer, row["answer"]) else "wrong",
                f"{len(found.tree) - 1}",
                f"{usage.new_tokens:,}",
                f"{usage.seconds:.1f}",
            ]
        )
    for cells in zip(("", "the examples", "30 hidden tests", "programs", "tokens", "seconds"), *columns, strict=True):
        table.add_row(*cells)
    page.print(table, soft_wrap=False)
    chosen = ", the first that one answer gets wrong and the search right" if number == _CHOSEN else ""
    page.print(
        f"\nQuestion {number} of the first 20 of benchmarks/list_functions.py{chosen}.",
        f"The search ({task.search}) samples programs, tests them on the examples, and repairs the best one.",
        "The hidden tests only judge the answers.",
        sep="\n",
    )
