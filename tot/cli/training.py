"""`tot train-value` and `tot instances`: train value heads, and generate questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tot.cli.options import takes, writable
from tot.decoders.errors import validated
from tot.decoders.training.options import ValueOptions


@takes(ValueOptions)
def train_value_command(
    questions: Annotated[str, typer.Option(help="TASK=FILE: questions with answers, such as gsm8k=train.jsonl.")],
    model: Annotated[str, typer.Option(help="The model of the states: a name, a hub id, a folder or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="The head's file, .safetensors.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder of intermediate files, to resume from; by default beside the head.")
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a head that predicts from hidden states whether a path is correct. An interrupted run resumes."""
    from tot.report.terminal import console
    from tot.training.value import run

    run(questions, model, validated(ValueOptions, given, "train-value"), writable(out), folder, console())


def instances_command(
    task: Annotated[str, typer.Argument(help="A task that can generate questions, such as blocksworld.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 0,
    without: Annotated[list[Path] | None, typer.Option(help="Exclude the questions of these files.")] = None,
) -> None:
    """Generate distinct questions of a task."""
    from tot.training.instances import make_instances

    make_instances(task, out, count, seed, without or [])
