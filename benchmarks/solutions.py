"""The command `solutions`: the rows' own solutions for `tot train cllm`, to fine-tune a model on a task first."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.texts import write_texts
from tot.decoders.errors import OptionError, TaskError
from tot.decoders.models.loading import load_model
from tot.evaluation.solutions import NO_QUESTIONS, Asked, solutions
from tot.report.terminal import counting


class Options(BaseModel):
    """Write the rows' own solutions for tot train cllm, to fine-tune a model on a task first."""

    out: Path = Field(description="The folder to write texts to; an incomplete one is resumed.")
    questions: list[str] = Field(description="TASK=FILE: questions with solutions. Repeat for more.")
    model: str = Field("smollm2-135m", description="A name, a hub id, a folder or a .gguf file.")
    limit: int | None = Field(None, ge=1, description="Number of questions.")


def run(asked: Options, _: Console) -> None:
    """Write the texts. Raises OptionError if there are no questions, and TaskError for a row without a solution."""
    found = list(islice(solutions(asked.questions, max_tokens=128), asked.limit))
    if not found:
        raise OptionError(NO_QUESTIONS)
    texts = [(one.request, _solution(one)) for one in found]
    with counting("writing", len(texts)) as tell:
        write_texts(load_model(asked.model), texts, asked.out, lambda count: tell(count, f"{count} texts"))


def _solution(asked: Asked) -> str:
    if "solution" not in asked.row:
        raise TaskError("a row has no solution: give rows with a `solution`")
    return str(asked.row["solution"])
