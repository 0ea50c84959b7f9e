"""The command line: `tot solve`, `tot models`, `tot bench`. Results on standard output, progress on standard error."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from tot.cli import bench, cllm, fastcot
from tot.cli.eval import eval_command
from tot.cli.options import SearchOptions, is_given, takes
from tot.cli.report import report_command
from tot.cli.serve import serve_command
from tot.decoders.errors import OptionError, TotError

# OpenMP's threads spin while they wait for each other. Beside another busy process long spinning makes a step 10 times
# as slow; none at all costs 20% on a quiet machine; this is in between. Read when torch is loaded, so set before.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

app = typer.Typer(
    name="tot",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reasoning with trees of thoughts on language models that you run yourself.",
)
app.add_typer(bench.app, name="bench")
app.add_typer(cllm.app, name="cllm")
app.add_typer(fastcot.app, name="fastcot")


@app.command("solve")
@takes(SearchOptions)
def solve_command(
    context: typer.Context,
    *,
    task: Annotated[
        str | None, typer.Argument(help="A task's name, such as gsm8k, or path/to/file.py:ClassName.")
    ] = None,
    question: Annotated[
        str | None, typer.Argument(help="The question; - reads standard input; none: an example.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Take the question from this file: .jsonl, .json, .csv, .parquet or .txt.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of --data, counted from 0.")] = 0,
    given: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the run (answer, usage, tree) to this .json file, and each step to a .jsonl beside."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a killed run from its .jsonl, as it was started.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where the time went; on standard error with --json.")
    ] = False,
    profile_out: Annotated[
        Path | None,
        typer.Option(help="Write that to this .json file, too, as a trace for Perfetto or chrome://tracing."),
    ] = None,
) -> None:
    """Grow a tree of thoughts about a question and answer it."""
    started = time.monotonic()
    from tot.checkpoint import Checkpoint
    from tot.cli.settings import Settings, ask, carry_out, checked

    if resume is not None:
        for name in context.params:
            if name not in ("resume", "as_json", "profile", "profile_out") and is_given(context, name):
                raise OptionError(f"--resume goes on as the run was started: leave {name.replace('_', '-')!r} out")
        trace: Checkpoint | None = Checkpoint.resume(resume)
        assert trace is not None
        if "settings" not in trace.header:
            raise OptionError(f"{resume} was not written by `tot solve`: resume it with solve(..., checkpoint=...)")
        settings = Settings.model_validate(trace.header["settings"])
    else:
        if task is None:
            raise OptionError("there is no task: give its name, such as gsm8k, or path/to/file.py:ClassName")
        place = None if out is None else str(checked(out))
        settings = Settings(task=task, question=ask(task, question, data, row), out=place, **given)
        trace = None
    recorded = None
    if profile or profile_out is not None:
        from tot.report.profiling import Profile

        recorded = Profile()
    if profile_out is not None:
        checked(profile_out, "--profile-out")
    interrupted = carry_out(settings, trace, started, as_json, recorded)
    if recorded is not None:
        from tot.report.profile import show_profile

        show_profile(recorded, as_json)
        if profile_out is not None:
            recorded.save(profile_out)
    if interrupted:
        raise typer.Exit(130)


app.command("eval")(eval_command)
app.command("report")(report_command)
app.command("serve")(serve_command)


@app.command("models")
def models_command() -> None:
    """List the models that can be loaded here, and where they are."""
    from tot.decoders.models.loading import list_models

    console = Console(highlight=False, soft_wrap=True)
    for entry in list_models():
        place = entry.where if entry.where is not None else "not here"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        console.print(Text("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note)))))


@app.command("train-draft")
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
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to record, at least.")] = 500_000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft.")] = 4,
    width: Annotated[int, typer.Option(min=64, help="Its hidden size, in steps of 64.")] = 192,
    epochs: Annotated[float, typer.Option(min=0.0, help="How often each text is trained on.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="The draft's folder; by default the target's own, in the cache.")
    ] = None,
) -> None:
    """Train a small draft model for a target, on what the target itself writes. Stopped, it goes on where it was."""
    from tot.decoders.training.distill.train import DraftOptions
    from tot.training.train_draft import run

    options = DraftOptions(tokens=tokens, layers=layers, width=width, epochs=epochs, seed=seed)
    run(model, questions or [], text or [], options, out, Console(highlight=False, soft_wrap=True))


@app.command("instances")
def instances_command(
    task: Annotated[str, typer.Argument(help="A task that can make questions up, such as blocksworld.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Questions.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds, other questions.")] = 0,
    without: Annotated[list[Path] | None, typer.Option(help="Leave out the questions of these files.")] = None,
) -> None:
    """Make up questions of a task, each only once."""
    from tot.training.instances import made_up

    made_up(task, out, count, seed, without or [], Console(highlight=False, width=None if sys.stdout.isatty() else 150))


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="A run or a trace that tot solve --out wrote.")],
    to: Annotated[Path, typer.Argument(help="A .graphml, .dot or .gv file.")],
) -> None:
    """Write a run's tree as GraphML or DOT."""
    from tot.report.export import export
    from tot.tree import ThoughtTree

    export(ThoughtTree.load(run), to)


def main(arguments: list[str] | None = None) -> int:
    """Entry point: errors that the user can put right are one line on standard error and exit status 2."""
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no star is no reason to lose the answer
    try:
        return int(command.main(args=arguments, prog_name="tot", standalone_mode=False) or 0)
    except (TotError, ValidationError) as error:
        return _say(_first_line(error))
    except typer.TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # `tot` and `tot bench` alone: their help
            sys.stderr.write(f"{message}\n")
            return 2
        return _say(_usage_message(error))
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return 130


def _say(message: str) -> int:
    sys.stderr.write(f"tot: {message}\n")
    return 2


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place} = {first['input']!r}: {first['msg']}"
    return " ".join(str(error).split())


def _usage_message(error: Any) -> str:
    """The parser's complaint on one line, naming the choices where an option or a command is unknown."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None or not message.lower().startswith("no such"):
        return message
    command = context.command
    names = list(getattr(command, "commands", {})) or [
        option for p in command.params for option in p.opts if option[0] == "-"
    ]
    complaint = re.split(r"\.? Did you mean| \(|\.$", message)[0]
    return f"{complaint}: choose one of {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
