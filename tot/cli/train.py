"""`tot train`: train consistency models."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tot.cli.flags import is_given, takes
from tot.decoders.errors import OptionError, TaskError
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.report.terminal import console, counting

if TYPE_CHECKING:
    from tot.evaluation.solutions import Asked

app = typer.Typer(
    no_args_is_help=True,
    help="Train consistency models for jacobi.",
    rich_markup_mode=None,
)
Model = Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")]
Texts = Annotated[Path, typer.Option(help="The folder to write texts to; an incomplete one is resumed.")]


@app.command("collect")
@takes(CollectOptions)
def collect_command(
    context: typer.Context,
    out: Texts,
    questions: Annotated[
        list[str], typer.Option(help="TASK=FILE: questions to request whole solutions for; may be repeated.")
    ],
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of new tokens per text.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of questions.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Number of questions to skip first.")] = 0,
    solutions: Annotated[
        bool, typer.Option(help="Write the rows' own solutions instead, to fine-tune a model on a task first.")
    ] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Decode questions by Jacobi iteration and save the trajectories."""
    from tot.decoders.engine.engine import Engine
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm import trajectories
    from tot.evaluation.solutions import NO_QUESTIONS
    from tot.evaluation.solutions import solutions as requested

    for name in [*given, "max_tokens"] if solutions else ():
        if is_given(context, name):
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} applies to texts that a model writes: leave it or --solutions out")
    source = requested(questions, max_tokens)
    source = islice(source, offset, None if limit is None else offset + limit)
    first = next(source, None)
    if first is None:
        raise OptionError(NO_QUESTIONS)
    selected = chain([first], source)
    with counting("writing" if solutions else "collecting", limit) as tell:
        if solutions:
            texts = ((one.request, _solution(one)) for one in selected)
            trajectories.given(load_model(model), texts, out, lambda count: tell(count, f"{count} texts"))
            return
        with Engine(load_model(model)) as engine:
            trajectories.collect(
                engine,
                (one.request for one in selected),
                out,
                CollectOptions(**given),
                lambda texts, windows, dropped: tell(texts, f"{texts} texts, {windows} windows, {dropped} dropped"),
            )


def _solution(asked: Asked) -> str:
    """Return the row's own solution."""
    if "solution" not in asked.row:
        raise TaskError("a row has no solution: give rows with a `solution`")
    return str(asked.row["solution"])


@app.command("cllm")
@takes(TrainOptions)
def cllm_command(
    data: Annotated[Path, typer.Option(help="A folder written by tot train collect.")],
    out: Annotated[Path, typer.Option(help="The new model's folder; an incomplete one is resumed.")],
    model: Annotated[str, typer.Option(help="The model that wrote the trajectories.")] = "smollm2-135m",
    *,
    given: dict[str, Any],
) -> None:
    """Train a model on its trajectories to map any point of a trajectory to its end."""
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm.train import train
    from tot.report.plots import losses, save

    with counting("training", None) as tell:
        train(
            load_model(model),
            data,
            out,
            TrainOptions(**given),
            lambda step, steps, value: tell(step, f"step {step} of {steps}, loss {value:.3f} nats", steps),
        )
    save(losses(out / "losses.jsonl"), out / "losses.png")
    console().print(f"{out}: the model, losses.jsonl and losses.png")
