"""`tot train-draft`, `tot train-value`, `tot instances`: a small draft model for a target, a head that reads from its
states whether a path ends right, and questions to train and to measure on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tot.cli.options import takes, writable
from tot.decoders.errors import validated
from tot.decoders.training.options import DraftOptions, ValueOptions


@takes(DraftOptions)
def train_draft_command(
    questions: Annotated[
        list[str] | None,
        typer.Option(help="TASK=FILE: questions whose thoughts the target writes; again for more tasks."),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Texts for the target to read, besides: .txt, .jsonl, .csv, …")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The target: a name, a hub id, a folder or a .gguf file.")
    ] = "smollm2-135m",
    *,
    given: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="The draft's folder; by default the target's own, in the cache.")
    ] = None,
) -> None:
    """Train a small draft model for a target, on what the target itself writes. Stopped, it goes on where it was."""
    from tot.report.terminal import console
    from tot.training.train_draft import run

    run(model, questions or [], text or [], DraftOptions(**given), out, console())


@takes(ValueOptions)
def train_value_command(
    questions: Annotated[str, typer.Option(help="TASK=FILE: questions with answers, such as gsm8k=train.jsonl.")],
    model: Annotated[str, typer.Option(help="Whose states are read: a name, a hub id, a folder or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="The head's file, .safetensors.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the work is kept, and gone on with; by default beside the head.")
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train a head that reads from hidden states whether a path ends right. Stopped, it goes on where it was."""
    from tot.report.terminal import console
    from tot.training.value import run

    run(questions, model, validated(ValueOptions, given, "train-value"), writable(out), folder, console())


def instances_command(
    task: Annotated[str, typer.Argument(help="A task that can make questions up, such as blocksworld.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Questions.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds, other questions.")] = 0,
    without: Annotated[list[Path] | None, typer.Option(help="Leave out the questions of these files.")] = None,
) -> None:
    """Make up questions of a task, each only once."""
    from tot.training.instances import make_instances

    make_instances(task, out, count, seed, without or [])
