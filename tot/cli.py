"""The command line: `tot solve`, `tot models`, `tot bench`. Results on standard output, progress on standard error."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tot.decoders.errors import OptionError, TotError, unknown

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
bench = typer.Typer(
    no_args_is_help=True, help="Benchmarks: both sides in one run, ratios printed.", rich_markup_mode=None
)
app.add_typer(bench, name="bench")


class Dtype(StrEnum):
    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@app.command("solve")
def solve_command(
    task: Annotated[str, typer.Argument(help="A task's name, such as gsm8k.")],
    question: Annotated[
        str | None, typer.Argument(help="The question; - reads standard input; none: an example.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A name (tot models), a hub id, a folder or a .gguf file.")
    ] = "smollm2-135m",
    decoder: Annotated[
        str, typer.Option(help="A decoder, or purpose=decoder pairs (generate, evaluate, answer).")
    ] = "ar",
    search: Annotated[str, typer.Option(help="The search algorithm.")] = "bfs",
    thoughts: Annotated[int, typer.Option(help="Thoughts proposed after each state (n).")] = 3,
    breadth: Annotated[int, typer.Option(help="States kept at each level (b).")] = 3,
    depth: Annotated[int | None, typer.Option(help="Depth of the tree (T); the task's own by default.")] = None,
    evaluator: Annotated[str, typer.Option(help="How states are valued: likelihood or value.")] = "likelihood",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most new tokens of any text.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of the thoughts; the papers use 1.")] = 0.7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    budget_tokens: Annotated[int | None, typer.Option(min=0, help="Stop after so many new tokens.")] = None,
    budget_forwards: Annotated[int | None, typer.Option(min=0, help="Stop after so many forward passes.")] = None,
    budget_seconds: Annotated[float | None, typer.Option(min=0.0, help="Stop after so many seconds of search.")] = None,
    budget_nodes: Annotated[int | None, typer.Option(min=0, help="Stop after so many thoughts.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: bf16 where the machine computes in it.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    kv_budget: Annotated[
        str | None, typer.Option(help="Store of keys and values, in tokens or bytes (1.5GiB).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the run (answer, usage, tree) to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Grow a tree of thoughts about a question and answer it."""
    started = time.monotonic()
    from tot.decoders.budget import Budget
    from tot.search import BFS
    from tot.task import load_task

    if search != "bfs":
        raise OptionError(unknown("search", search, ["bfs"]))
    if evaluator not in ("likelihood", "value"):
        raise OptionError(unknown("evaluator", evaluator, ("likelihood", "value")))
    if out is not None and not out.resolve().parent.is_dir():
        raise OptionError(f"--out {out}: the folder {out.resolve().parent} does not exist: make it first")
    if out is not None and out.is_dir():
        raise OptionError(f"--out {out} is a folder: give a file in it")
    chosen_task = load_task(task)
    options = BFS(thoughts=thoughts, breadth=breadth, depth=depth)
    budget = Budget(tokens=budget_tokens, forwards=budget_forwards, seconds=budget_seconds, nodes=budget_nodes)
    if question is None:
        question = chosen_task.example()
    elif question == "-":
        question = read_question()
    chosen_task.start(question)

    from tot.report.terminal import plain, tree_view, usage_line
    from tot.search.problem import Problem
    from tot.solver import EVALUATORS, conclude, solve
    from tot.thoughts import Sample
    from tot.tree import write_json

    problems: list[Problem] = []
    progress = Progress(problems, started, quiet=as_json)
    try:
        with progress:
            solution = solve(
                chosen_task,
                question,
                model=model,
                decoder=parse_decoder(decoder),
                search=options,
                generator=Sample(temperature=temperature),
                evaluator=EVALUATORS[evaluator](),
                budget=budget,
                max_tokens=max_tokens,
                seed=seed,
                watch=lambda problem: problems.append(problem) if not problems else None,
                dtype=dtype.value,
                device=device,
                kv_budget=kv_budget,
            )
    except BaseException:
        if out is not None and problems:  # what was grown until then is kept
            write_json(out, conclude(problems[0]).to_json())
        raise
    if out is not None:
        write_json(out, solution.to_json())
    if as_json:
        sys.stdout.write(json.dumps(solution.summary()) + "\n")
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)  # a pipe gets whole lines
        console.print(tree_view(solution.tree))
        console.print()
        if solution.stopped:
            console.print(Text(f"Stopped early ({solution.stopped}); this is the best so far."))
        answer = solution.answer if solution.answer is not None else "none found"
        console.print(Text(f"Answer: {plain(answer)}", style="bold"))
        console.print(Text(usage_line(solution), style="dim"))
    if solution.stopped == "interrupted":
        raise typer.Exit(130)


class Progress:
    """A live line on standard error while a search runs: level, thoughts, tokens, elapsed. Silent in a pipe."""

    def __init__(self, problems: list[Any], started: float, quiet: bool) -> None:
        console = Console(stderr=True)
        self._problems = problems
        self._started = started
        self._live = None
        if console.is_terminal and not quiet:
            self._live = Live(console=console, get_renderable=self._line, refresh_per_second=8, transient=True)

    def _line(self) -> Text:
        elapsed = time.monotonic() - self._started
        if not self._problems:
            return Text(f"loading the model … {elapsed:.0f} s", style="dim")
        problem = self._problems[0]
        meter = problem.meter
        level = max(node.depth for node in list(problem.tree))
        rate = meter.new_tokens / max(meter.seconds, 1e-9)
        return Text(
            f"level {level}, {len(problem.tree) - 1} thoughts, {meter.new_tokens} tokens, {rate:.0f} tokens/s, "
            f"{elapsed:.0f} s",
            style="dim",
        )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def read_question() -> str:
    """All of standard input."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not {error.encoding} text ({error.reason}): convert it first") from None


def parse_decoder(text: str) -> Any:
    """`ar`, or `generate=ar,evaluate=ar` as a mapping from purpose to decoder."""
    if "=" not in text:
        return text
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(separator and name for _, separator, name in pairs):
        raise OptionError(f"--decoder {text!r} can't be read: write generate=NAME,evaluate=NAME")
    return {purpose.strip(): name.strip() for purpose, _, name in pairs}


@app.command("models")
def models_command() -> None:
    """List the models that can be loaded here, and where they are."""
    from tot.decoders.engine.loading import list_models

    console = Console(highlight=False, soft_wrap=True)
    for entry in list_models():
        place = entry.where if entry.where is not None else "not here"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        console.print(Text("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note)))))


@bench.command("packed")
def bench_packed_command(
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """Packed decoding against model.generate: speed, reuse of prompts, cost of attention, memory."""
    from tot.bench.packed import run

    run(model, rounds, out, Console(highlight=False, width=None if sys.stdout.isatty() else 150))


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
