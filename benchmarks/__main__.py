"""`python -m benchmarks NAME`, in a clone of the repository. Each benchmark is the module of its name."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer

from benchmarks.harness import BenchOptions
from tot.cli.app import main as run_app
from tot.cli.flags import takes, writable
from tot.decoders.errors import validated
from tot.report.terminal import console

NAMES = (
    *("answers", "calibrate", "calls", "cllm", "constraints", "deadlines", "decoders", "demo", "fastcot", "optimize"),
    *("pdos", "peers", "quality", "solutions", "start", "steps", "thinking"),
)


def make_app(name: str = "") -> typer.Typer:
    """Return the command line with the benchmark `name`, or with all if there is no such benchmark."""
    app = typer.Typer(
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Benchmarks of all sides in one run, with ratios.",
    )
    app.callback()(lambda: None)
    for one in [name] if name in NAMES else NAMES:
        _add(app, one)
    return app


def _add(app: typer.Typer, name: str) -> None:
    """Add a benchmark as a command: its module has its options, and the function that runs it on a console."""
    benchmark = import_module(f"benchmarks.{name}")

    @takes(benchmark.Options)
    def command(*, given: dict[str, Any]) -> None:
        options = validated(benchmark.Options, given, f"benchmarks {name}")
        if isinstance(options, BenchOptions) and options.out is not None:
            writable(options.out)
        benchmark.run(options, console())

    app.command(name, help=benchmark.Options.__doc__)(command)


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark, by default the command line's, and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_app(arguments, make_app(given[0] if given else ""), "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main())
