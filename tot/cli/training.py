"""`tot train-draft` and `tot instances`: a small draft model for a target, and questions to train and to measure on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tot.cli.options import takes
from tot.decoders.training.options import DraftOptions


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
