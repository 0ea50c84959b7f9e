"""`tot bench peers`: beside transformers, llama.cpp and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.cli.options import writable
from tot.decoders.errors import OptionError
from tot.report.terminal import console


def bench_command(
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="Number format of our side, transformers and vLLM.")] = "auto",
    parts: Annotated[
        str | None, typer.Option(help="With commas: decode, limit, tree, evaluations, answers. All of them by default.")
    ] = None,
    sides: Annotated[
        str | None,
        typer.Option(
            help="What to compare with, with commas: int8 (our own), batched, serial, assisted, continuous (all "
            "transformers), llama, vllm. All by default."
        ),
    ] = None,
    branches: Annotated[str, typer.Option(help="Samples of one prompt, with commas.")] = "1,3,5,15,32,64",
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each of them.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    thoughts: Annotated[str, typer.Option(help="Thoughts after each state of a search (n), with commas.")] = "3,5",
    problems: Annotated[int, typer.Option(min=1, help="Problems that are searched, one a round.")] = 8,
    data: Annotated[
        Path | None, typer.Option(help="GSM8K problems, as for tot eval; up to 8 made-up ones without.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds: what will take longer is done once; three times as long, not at all.")
    ] = 60.0,
    vllm: Annotated[Path, typer.Option(help="The Python that has vLLM (make peers).")] = Path(".venv-vllm/bin/python"),
    llama: Annotated[Path, typer.Option(help="The Python that has llama-cpp-python (make peers).")] = Path(
        ".venv-llama/bin/python"
    ),
    out: Annotated[Path | None, typer.Option(help="Write all numbers to this .json file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Branches and whole searches, here and in transformers, llama.cpp and vLLM: speed, and what is to be reached."""
    from tot.bench.peers.run import PARTS, Options, run
    from tot.bench.peers.sides import KINDS, Plan

    kinds = KINDS if sides is None else tuple(name.strip() for name in sides.split(","))
    options = Options(
        Plan(model, dtype, vllm, llama, kinds),
        branches=_counts("branches", branches),
        rounds=rounds,
        new_tokens=new_tokens,
        thoughts=_counts("thoughts", thoughts),
        problems=problems,
        data=data,
        patience=patience,
        parts=PARTS if parts is None else tuple(part.strip() for part in parts.split(",")),
        out=None if out is None else writable(out),
        markdown=markdown,
    )
    run(options, console())


def _counts(option: str, given: str) -> tuple[int, ...]:
    """In order, from the least."""
    try:
        counts = tuple(sorted({int(count) for count in given.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise OptionError(f"--{option} {given!r} can't be read: write numbers from 1 on, such as 1,15")
    return counts
