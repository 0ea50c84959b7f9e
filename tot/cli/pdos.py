"""`tot bench pdos`: parallel steps, outlines and drafts against normal decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.cli.options import writable
from tot.decoders.errors import OptionError
from tot.report.terminal import console


def bench_command(
    tasks: Annotated[
        str | None,
        typer.Option(help="With commas: retrieval, planning, qa. By default the first two, and qa where --data is."),
    ] = None,
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    people: Annotated[
        str | None, typer.Option(help="Retrieval: how many people, 4 to 100, with commas; by default 10.")
    ] = None,
    aspects: Annotated[
        str | None, typer.Option(help="Planning: how many aspects, 2 to 10, with commas; by default 2,4,6,8,10.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="QA: a .jsonl file in the format of LongBench's 2WikiMultihopQA, with input, context, answers."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="The model that marks plans and answers from 1 to 5; by default the one that writes them."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Questions of each kind; the sides take turns at each.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers and all answers to this .json file.")] = None,
) -> None:
    """Parallel steps against normal decoding, skeleton-of-thought and chain-of-draft: quality, speed, memory."""
    from tot.bench.pdos import Chosen, run

    named = tasks or ("retrieval,planning" if data is None else "retrieval,planning,qa")
    chosen = Chosen(
        tuple(name.strip() for name in named.split(",")),
        _counts("people", people),
        _counts("aspects", aspects),
        data,
        judge,
        rounds,
    )
    run(model, chosen, None if out is None else writable(out), console())


def _counts(option: str, given: str | None) -> tuple[int, ...]:
    if given is None:
        return ()
    try:
        return tuple(int(count) for count in given.split(","))
    except ValueError:
        raise OptionError(f"--{option} {given!r} can't be read: write numbers, such as 4,10") from None
