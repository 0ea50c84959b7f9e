"""`tot bench`: benchmarks that measure all sides in one run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from tot.bench import options as of
from tot.cli.options import picture_file, takes, writable
from tot.decoders.errors import validated
from tot.report.terminal import console

BENCHES: dict[str, tuple[type[of.BenchOptions], str]] = {
    "answers": (of.AnswersOptions, "answers:run"),
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

app = typer.Typer(no_args_is_help=True, help="Benchmarks of all sides in one run, with ratios.", rich_markup_mode=None)


def add(to: typer.Typer, name: str, options: type[of.BenchOptions], place: str) -> None:
    """Add a benchmark as a command, with its options and the `tot.bench` function that runs it on a console."""

    @takes(options)
    def command(context: typer.Context, *, given: dict[str, Any]) -> None:
        settings = validated(options, given, context.command_path.partition(" ")[2])
        if settings.out is not None:
            writable(settings.out)
        if plot := getattr(settings, "picture", None):
            picture_file(plot, "--picture")
        module, _, function = place.partition(":")
        getattr(import_module(f"tot.bench.{module}"), function)(settings, console())

    to.command(name, help=options.__doc__)(command)


for _name, (_options, _place) in BENCHES.items():
    add(app, _name, _options, _place)
