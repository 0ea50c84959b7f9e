"""`tot train`: train consistency models."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from tot.cli.flags import takes
from tot.decoders.errors import OptionError
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.report.terminal import console, counting

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
    out: Texts,
    questions: Annotated[
        list[str], typer.Option(help="TASK=FILE: questions to request whole solutions for; may be repeated.")
    ],
    model: Model = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of new tokens per text.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of questions.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Number of questions to skip first.")] = 0,
    *,
    given: dict[str, Any],
) -> None:
    """Decode questions by Jacobi iteration and save the trajectories."""
    from tot.decoders.engine.engine import Engine
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm.trajectories import collect
    from tot.evaluation.solutions import NO_QUESTIONS, solutions

    source = solutions(questions, max_tokens)
    source = islice(source, offset, None if limit is None else offset + limit)
    first = next(source, None)
    if first is None:
        raise OptionError(NO_QUESTIONS)
    selected = chain([first], source)
    with counting("collecting", limit) as tell, Engine(load_model(model)) as engine:
        collect(
            engine,
            (one.request for one in selected),
            out,
            CollectOptions(**given),
            lambda texts, windows, dropped: tell(texts, f"{texts} texts, {windows} windows, {dropped} dropped"),
        )


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
