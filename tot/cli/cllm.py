"""`tot cllm collect`, `train` and `eval`: consistency LLMs, from trajectories to what they are worth."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    help="Consistency LLMs: models tuned to be decoded several tokens a forward.",
    rich_markup_mode=None,
)

Questions = Annotated[
    list[str] | None, typer.Option(help="TASK=FILE: questions whose whole solutions are asked for; again for more.")
]
Prompts = Annotated[list[Path] | None, typer.Option(help="Files of prompts: .jsonl, .csv, .parquet, …")]
Column = Annotated[str, typer.Option(help="The column of --prompts that holds the prompt.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Most new tokens of a text.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Take so many questions.")]


class Loss(StrEnum):
    GLOBAL = "global"
    LOCAL = "local"


class Divergence(StrEnum):
    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JSD = "jsd"


@app.command("collect")
def collect_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The folder to write trajectories to; one that was begun is gone on with.")],
    questions: Questions = None,
    prompts: Prompts = None,
    column: Column = "prompt",
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    n: Annotated[int, typer.Option(min=2, max=128, help="Tokens of a window.")] = 16,
    max_tokens: MaxTokens = 128,
    limit: Limit = None,
    offset: Annotated[int, typer.Option(min=0, help="Leave out so many questions first.")] = 0,
    solutions: Annotated[
        bool, typer.Option(help="Keep the rows' own solutions instead, to fine-tune a model on a task first.")
    ] = False,
    augment: Annotated[float, typer.Option(min=0, max=1, help="Chance of a wrong token to be corrected.")] = 0.3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Decode questions by Jacobi iteration and keep the trajectories."""
    from tot.decoders.engine.engine import Engine
    from tot.decoders.errors import OptionError
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm.trajectories import CollectOptions, collect, given
    from tot.report.terminal import counting
    from tot.training.cllm import NOTHING_TO_ASK, questions_of

    stop = None if limit is None else offset + limit
    if solutions and prompts:
        raise OptionError("--prompts have no solutions: leave them or --solutions out")
    for name in ("n", "augment", "max_tokens", "seed") if solutions else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise OptionError(
                f"--{name.replace('_', '-')} is about texts that a model writes: leave it or --solutions out"
            )
    asked = islice(questions_of(questions or [], prompts or [], column, max_tokens, solutions), offset, stop)
    first = next(asked, None)
    if first is None:
        raise OptionError(NOTHING_TO_ASK)
    if solutions:
        texts = ((one.request, one.solution or "") for one in chain([first], asked))
        with counting("writing", limit, _console()) as tell:
            given(load_model(model), texts, out, lambda count: tell(count, f"{count} texts"))
        return
    options = CollectOptions(n=n, augment=augment, seed=seed)
    with Engine(load_model(model)) as engine, counting("collecting", limit, _console()) as tell:
        collect(
            engine,
            (question.request for question in chain([first], asked)),
            out,
            options,
            lambda texts, windows, dropped: tell(texts, f"{texts} texts, {windows} windows, {dropped} left out"),
        )


@app.command("train")
def train_command(
    data: Annotated[Path, typer.Option(help="A folder that tot cllm collect wrote.")],
    out: Annotated[Path, typer.Option(help="The new model's folder; one that was begun is gone on with.")],
    model: Annotated[str, typer.Option(help="The model that the trajectories are of.")] = "smollm2-135m",
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    learning_rate: Annotated[float, typer.Option(min=0)] = 2e-5,
    loss: Annotated[Loss, typer.Option(help="global: to the fixed point; local: to the next point.")] = Loss.GLOBAL,
    divergence: Annotated[Divergence, typer.Option()] = Divergence.FORWARD_KL,
    ar_weight: Annotated[float, typer.Option(min=0, help="Weight of the AR loss (w).")] = 10.0,
    windows: Annotated[int, typer.Option(min=1, help="Windows of a text in one forward.")] = 4,
    accumulate: Annotated[int, typer.Option(min=1, help="Texts a step.")] = 4,
    together: Annotated[int, typer.Option(min=1, help="Texts a forward.")] = 4,
    lora: Annotated[int | None, typer.Option(min=1, help="Train LoRA matrices of this rank only.")] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, more time.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train a model on its trajectories, so that any point of one leads to its end."""
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm.train import TrainOptions, train
    from tot.report.plots import losses, save
    from tot.report.terminal import counting

    options = TrainOptions(
        epochs=epochs,
        learning_rate=learning_rate,
        loss=loss.value,
        divergence=divergence.value,
        ar_weight=ar_weight,
        windows=windows,
        accumulate=accumulate,
        together=together,
        lora=lora,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
    )
    console = _console()
    with counting("training", None, console) as tell:
        train(
            load_model(model),
            data,
            out,
            options,
            lambda step, steps, value: tell(step, f"step {step} of {steps}, loss {value:.3f} nats", steps),
        )
    save(losses(out / "losses.jsonl"), out / "losses.png")
    console.print(f"{out}: the model, losses.jsonl and losses.png")


@app.command("eval")
def eval_command(
    model: Annotated[str, typer.Option(help="The consistency LLM.")],
    questions: Questions = None,
    prompts: Prompts = None,
    column: Column = "prompt",
    base: Annotated[str, typer.Option(help="The model that it was made from.")] = "smollm2-135m",
    n: Annotated[int, typer.Option(min=1, max=128, help="Tokens of a window.")] = 16,
    max_tokens: MaxTokens = 128,
    limit: Limit = 50,
    offset: Annotated[int, typer.Option(min=0, help="Leave out so many questions first.")] = 0,
    shuffle_seed: Annotated[
        int | None, typer.Option(min=0, help="Take the questions in a random order; other seeds, other orders.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bf16, fp16 or fp32.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")] = None,
) -> None:
    """A consistency LLM against its base: speed, tokens a forward, score, answers unchanged."""
    from random import Random

    from tot.cli.settings import checked
    from tot.training.cllm import Question, evaluate, questions_of

    stop = None if limit is None else offset + limit
    found: Iterable[Question] = questions_of(questions or [], prompts or [], column, max_tokens)
    if shuffle_seed is not None:
        found = list(found)
        Random(shuffle_seed).shuffle(found)
    asked = list(islice(found, offset, stop))
    evaluate(model, base, asked, n, dtype, None if out is None else checked(out), _console())


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 150)
