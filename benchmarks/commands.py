"""The commands of `python -m benchmarks`, each of which measures all sides in one run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import options as of
from tot.cli.options import picture_file, takes, writable
from tot.decoders.errors import validated
from tot.report.terminal import console, counting

BENCHES: dict[str, tuple[type[of.BenchOptions], str]] = {
    "answers": (of.AnswersOptions, "answers:run"),
    "cllm": (of.CLLMOptions, "papers.cllm:run"),
    "decoders": (of.DecodersOptions, "decoders:run"),
    "fastcot": (of.FastCoTBench, "papers.fastcot:run"),
    "neighbours": (of.NeighboursOptions, "peers.neighbours:run"),
    "optimize": (of.OptimizeOptions, "optimize:run"),
    "pdos": (of.PDOSBench, "papers.pdos:run"),
    "peers": (of.PeersOptions, "peers.peers:run"),
    "quality": (of.QualityOptions, "quality:run"),
    "schedule": (of.ScheduleOptions, "costs:run"),
    "start": (of.StartOptions, "start:run"),
}

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Benchmarks of all sides in one run, with ratios.",
)


def _add(name: str, options: type[of.BenchOptions], place: str) -> None:
    """Add a benchmark as a command, with its options and the function that runs it on a console."""

    @takes(options)
    def command(*, given: dict[str, Any]) -> None:
        settings = validated(options, given, f"benchmarks {name}")
        if settings.out is not None:
            writable(settings.out)
        if plot := getattr(settings, "picture", None):
            picture_file(plot, "--picture")
        module, _, function = place.partition(":")
        getattr(import_module(f"benchmarks.{module}"), function)(settings, console())

    app.command(name, help=options.__doc__)(command)


for _name, (_options, _place) in BENCHES.items():
    _add(_name, _options, _place)


@app.command("steps")
def steps_command(
    out: Annotated[Path, typer.Option(help="The folder to write texts to; an incomplete one is resumed.")],
    model: Annotated[str, typer.Option(help="The model to train: a name, a hub id or a folder.")] = "smollm2-135m",
    questions: Annotated[int, typer.Option(min=1, help="Number of questions, each with four texts.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
) -> None:
    """Write made-up questions with answers in parallel steps, to train a model on the format of pdos."""
    from benchmarks.papers.pdos_teaching import taught
    from tot.decoders.engine.text import TextCodec
    from tot.decoders.models.loading import load_model
    from tot.decoders.training.cllm.trajectories import given

    loaded = load_model(model)
    with counting("writing", 4 * questions) as tell:
        texts = taught(questions, seed, TextCodec(loaded.tokenizer))
        given(loaded, texts, out, lambda count: tell(count, f"{count} texts"))
