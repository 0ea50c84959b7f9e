"""`tot bench servers`: searching on a server with requests side by side and one after the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def bench_command(
    base_url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    data: Annotated[Path, typer.Option(help="Questions with answers, as for tot eval.")],
    task: Annotated[str, typer.Option(help="What they are questions of.")] = "gsm8k",
    search: Annotated[str, typer.Option(help="The search, as for tot eval.")] = "bfs:thoughts=3,breadth=2,depth=3",
    limit: Annotated[int, typer.Option(min=1, help="Questions, searched at once on both sides.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of any text.")] = 48,
    concurrency: Annotated[int, typer.Option(min=2, help="Most requests in flight, against one at a time.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this .json file.")] = None,
) -> None:
    """All requests of a level in flight at an OpenAI-compatible server, against one request at a time."""
    from tot.bench.servers import Asked, run
    from tot.settings import checked

    asked = Asked(base_url, model, data, task, search, limit, max_tokens, concurrency)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    run(asked, rounds, None if out is None else checked(out), console)
