"""`tot train`: train consistency models, choose caps for FastCoT, and write texts in the format of PDOS."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import typer

from tot.cli.flags import is_given, takes, writable
from tot.decoders.errors import OptionError, validated
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.report.terminal import console, counting

app = typer.Typer(
    no_args_is_help=True,
    help="Train consistency models for jacobi, teach pdos' format, and choose a cap for fastcot.",
    rich_markup_mode=None,
)
Model = Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")]
Texts = Annotated[Path, typer.Option(help="The folder to write texts to; an incomplete one is resumed.")]
_BATCH = 16
"""Questions of fastcot that are decoded together."""
_EVERY = 4
"""Iterations between the tested caps."""


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
    source = requested(questions, max_tokens, solutions)
    source = islice(source, offset, None if limit is None else offset + limit)
    first = next(source, None)
    if first is None:
        raise OptionError(NO_QUESTIONS)
    selected = chain([first], source)
    with counting("writing" if solutions else "collecting", limit) as tell:
        if solutions:
            texts = ((question.request, question.solution or "") for question in selected)
            trajectories.given(load_model(model), texts, out, lambda count: tell(count, f"{count} texts"))
            return
        with Engine(load_model(model)) as engine:
            trajectories.collect(
                engine,
                (question.request for question in selected),
                out,
                CollectOptions(**given),
                lambda texts, windows, dropped: tell(texts, f"{texts} texts, {windows} windows, {dropped} dropped"),
            )


@app.command("pdos")
def pdos_command(
    data: Annotated[
        str, typer.Option(help="Rows with a question, its answer in steps ([title, text], …) and a conclusion.")
    ],
    out: Texts,
    model: Model = "smollm2-135m",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the parts of the answers.")] = 0,
) -> None:
    """Write answers in parallel steps for `tot train cllm`, which teaches a model the format of pdos."""
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm.trajectories import given
    from tot.decoders.training.steps import SteppedAnswer, step_texts
    from tot.evaluation.data import rows

    answers = [validated(SteppedAnswer, row, f"{data}, row {number}") for number, row in enumerate(rows(data), 1)]
    with counting("writing", 4 * len(answers)) as tell:
        given(load_model(model), step_texts(answers, seed), out, lambda count: tell(count, f"{count} texts"))


@app.command("cllm")
@takes(TrainOptions)
def cllm_command(
    data: Annotated[Path, typer.Option(help="A folder written by tot train collect or pdos.")],
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


@app.command("fastcot")
def fastcot_command(
    data: Annotated[
        str, typer.Option(help="Questions with answers: .jsonl, .json, .csv or .parquet, or org/name:split on the hub.")
    ],
    task: Annotated[str, typer.Option(help="A task with an answer trigger: multiple_choice, gsm8k, ….")] = (
        "multiple_choice"
    ),
    model: Model = "smollm2-135m",
    prompts: Annotated[
        Literal["chat", "papers"], typer.Option(help="As for tot eval: a cap is valid for these prompts.")
    ] = "papers",
    limit: Annotated[int, typer.Option(min=2, help="Number of questions, sampled from the file.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens per rationale.")] = 128,
    window: Annotated[int, typer.Option(min=0, max=128, help="Context window c.")] = 2,
    out: Annotated[Path, typer.Option(help="Write the curve to this .json file, and a plot beside it.")] = Path(
        "fastcot-calibration.json"
    ),
) -> None:
    """Find the smallest cap that keeps accuracy and answers, and save the curve. Reports the paper's cap, too."""
    from tot.decoders.engine.open_models import open_engine
    from tot.decoders.files import write_json
    from tot.decoders.training.caps import AGREEMENT, LOSS, Answers, by_iteration, decode_whole
    from tot.evaluation.solutions import described_cap, sampled_rationales
    from tot.report.plots import curves, save

    out = writable(out)
    rationales = sampled_rationales(task, data, limit, max_tokens, prompts == "chat")
    iterations = [*range(0, max_tokens + 1, _EVERY)]
    batches = []
    with open_engine(model) as engine, counting("calibrating", len(rationales)) as tell:
        for start in range(0, len(rationales), _BATCH):
            tell(start, f"{len(rationales)} questions")
            batch = rationales[start : start + _BATCH]
            batches.append(by_iteration(engine, batch, decode_whole(engine, batch, window), iterations))
    answers = [Answers.joined(parts) for parts in zip(*batches, strict=True)]
    cap, note = described_cap(iterations, answers, LOSS, AGREEMENT)
    full = fmean(answers[0].full)
    curve = {"accuracy": [one.accuracy for one in answers], "agreement": [one.agreement for one in answers]}
    about = {"model": model, "task": task, "prompts": prompts, "window": window, "note": note}
    write_json(out, {**about, "cap": cap, "iterations": iterations, **curve, "full": full})
    lines = {name: (iterations, [100 * value for value in values]) for name, values in curve.items()}
    save(curves(lines, "iterations", "%", {"accuracy with whole rationales": 100 * full}), out.with_suffix(".png"))
    output = console()
    output.print(f"{len(rationales)} questions, window {window}: {note}")
    output.print(f"the paper's rule, which limits only the loss: {described_cap(iterations, answers, LOSS)[1]}")
    if cap is not None:
        options = f"--decoder-option cap={cap} --decoder-option window={window}"
        output.print(f"use: --prompts {prompts} --decoder fastcot {options}")
    output.print(f"curve: {out}, {out.with_suffix('.png')}")
