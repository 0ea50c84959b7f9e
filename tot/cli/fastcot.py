"""`tot fastcot calibrate`: after how many iterations a rationale may be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.cli.options import writable
from tot.decoders.methods.options import FastCoTOptions
from tot.report.terminal import console, counting

app = typer.Typer(no_args_is_help=True, help="FastCoT: answers from rationales that are cut.", rich_markup_mode=None)

Data = Annotated[
    str, typer.Option(help="Questions with answers: .jsonl, .json, .csv or .parquet, or org/name:split on the hub.")
]
TaskName = Annotated[str, typer.Option("--task", help="A task with an answer trigger: multiple_choice, gsm8k, ….")]
Model = Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Most tokens of a rationale.")]
Window = Annotated[int, typer.Option(min=0, max=128, help="Context window c.")]
Loss = Annotated[float, typer.Option(min=0, max=1, help="Accuracy that may be lost, as a share.")]
Agreement = Annotated[float, typer.Option(min=0, max=1, help="Share of answers that have to stay as they are.")]


@app.callback()
def group() -> None:
    """A group, also while it has one command only."""


@app.command("calibrate")
def calibrate_command(
    data: Data,
    task: TaskName = "multiple_choice",
    model: Model = "smollm2-135m",
    limit: Annotated[int, typer.Option(min=2, help="Questions, drawn from those in the file.")] = 50,
    max_tokens: MaxTokens = 128,
    window: Window = FastCoTOptions.model_fields["window"].default,
    loss: Loss = 0.03,
    agreement: Agreement = 0.9,
    every: Annotated[int, typer.Option(min=1, help="Iterations between the caps that are tried.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds, other questions.")] = 0,
    out: Annotated[Path, typer.Option(help="Write the curve to this .json file, and a picture beside it.")] = Path(
        "fastcot-calibration.json"
    ),
) -> None:
    """Find the least cap that keeps accuracy and answers with a window (section 4.4), and save the curve."""
    from dataclasses import asdict

    from tot.decoders.engine.open_models import open_engine
    from tot.decoders.files import write_json
    from tot.report.plots import curves, save
    from tot.training.fastcot import BATCH, Answers, batches, by_iteration, decode_whole, find_cap, questions

    out = writable(out)
    asked = questions(task, data, limit, max_tokens, seed)
    with open_engine(model) as engine:
        iterations = [*range(0, max_tokens + 1, every)]
        done: list[list[Answers]] = []
        with counting("calibrating", len(asked)) as tell:
            for batch in batches(asked):
                tell(BATCH * len(done), f"{len(asked)} questions")
                done.append(by_iteration(engine, batch, decode_whole(engine, batch, window), iterations))
        answers = [Answers.joined(place) for place in zip(*done, strict=True)]
    found, note = find_cap(iterations, answers, loss, agreement)
    write_json(out, {"model": model, "task": task, "window": window, "note": note, **asdict(found)})
    lines = {
        "accuracy": (found.iterations, [100 * value for value in found.accuracy]),
        "answers unchanged": (found.iterations, [100 * value for value in found.agreement]),
    }
    save(curves(lines, "iterations", "%", {"accuracy of whole rationales": 100 * found.full}), out.with_suffix(".png"))
    shown = console()
    shown.print(f"{len(asked)} questions, window {window}: {note}")
    if found.cap is not None:
        shown.print(f"use them: --decoder fastcot --decoder-option cap={found.cap} --decoder-option window={window}")
    shown.print(f"curve: {out}, {out.with_suffix('.png')}")
