"""`tot fastcot calibrate`: find the number of iterations after which rationales may be truncated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tot.cli.options import writable
from tot.decoders.methods.options import FastCoTOptions
from tot.report.terminal import console, counting

app = typer.Typer(no_args_is_help=True, help="FastCoT: answers from truncated rationales.", rich_markup_mode=None)

Data = Annotated[
    str, typer.Option(help="Questions with answers: .jsonl, .json, .csv or .parquet, or org/name:split on the hub.")
]
TaskName = Annotated[str, typer.Option("--task", help="A task with an answer trigger: multiple_choice, gsm8k, ….")]
Model = Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")]
Prompts = Annotated[Literal["chat", "papers"], typer.Option(help="As for tot eval: a cap is valid for these prompts.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Maximum number of tokens per rationale.")]
Window = Annotated[int, typer.Option(min=0, max=128, help="Context window c.")]
Loss = Annotated[float, typer.Option(min=0, max=1, help="Maximum loss of accuracy, from 0 to 1.")]
Agreement = Annotated[float, typer.Option(min=0, max=1, help="Minimum share of unchanged answers.")]


@app.callback()
def group() -> None:
    """Make typer treat `fastcot` as a group even with a single command."""


@app.command("calibrate")
def calibrate_command(
    data: Data,
    task: TaskName = "multiple_choice",
    model: Model = "smollm2-135m",
    prompts: Prompts = "papers",
    limit: Annotated[int, typer.Option(min=2, help="Number of questions, sampled from the file.")] = 50,
    max_tokens: MaxTokens = 128,
    window: Window = FastCoTOptions.model_fields["window"].default,
    loss: Loss = 0.03,
    agreement: Agreement = 0.9,
    every: Annotated[int, typer.Option(min=1, help="Iterations between the tested caps.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample of questions.")] = 0,
    out: Annotated[Path, typer.Option(help="Write the curve to this .json file, and a plot beside it.")] = Path(
        "fastcot-calibration.json"
    ),
) -> None:
    """Find the smallest cap that keeps accuracy and answers, and save the curve. Reports the paper's cap, too."""
    from statistics import fmean

    from tot.decoders.engine.open_models import open_engine
    from tot.decoders.files import write_json
    from tot.report.plots import curves, save
    from tot.training.fastcot import BATCH, Answers, batches, by_iteration, decode_whole, find_cap, questions

    out = writable(out)
    rationales = questions(task, data, limit, max_tokens, seed, prompts == "chat")
    with open_engine(model) as engine:
        iterations = [*range(0, max_tokens + 1, every)]
        done: list[list[Answers]] = []
        with counting("calibrating", len(rationales)) as tell:
            for batch in batches(rationales):
                tell(BATCH * len(done), f"{len(rationales)} questions")
                done.append(by_iteration(engine, batch, decode_whole(engine, batch, window), iterations))
        answers = [Answers.joined(parts) for parts in zip(*done, strict=True)]
    cap, note = find_cap(iterations, answers, loss, agreement)
    full = fmean(answers[0].full)
    curve = {"accuracy": [one.accuracy for one in answers], "agreement": [one.agreement for one in answers]}
    about = {"model": model, "task": task, "prompts": prompts, "window": window, "note": note}
    write_json(out, {**about, "cap": cap, "iterations": iterations, **curve, "full": full})
    names = {"accuracy": "accuracy", "agreement": "answers unchanged"}
    lines = {names[name]: (iterations, [100 * value for value in values]) for name, values in curve.items()}
    levels = {"accuracy with whole rationales": 100 * full}
    save(curves(lines, "iterations", "%", levels), out.with_suffix(".png"))
    output = console()
    output.print(f"{len(rationales)} questions, window {window}: {note}")
    output.print(f"the paper's rule, which limits only the loss: {find_cap(iterations, answers, loss)[1]}")
    if cap is not None:
        options = f"--decoder-option cap={cap} --decoder-option window={window}"
        output.print(f"use: --prompts {prompts} --decoder fastcot {options}")
    output.print(f"curve: {out}, {out.with_suffix('.png')}")
