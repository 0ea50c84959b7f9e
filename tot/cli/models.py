"""`tot models` and `tot cache`: the models that `--model` takes, and the space that the cache takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tot.decoders.errors import TaskError, reason
from tot.report.terminal import console


def models_command(
    server: Annotated[
        str | None,
        typer.Option("--server", help="Address of a server, to report its differences: http://host:port/v1."),
    ] = None,
) -> None:
    """List the names that --model takes here without a download; with --server, report that server and its models."""
    if server is not None:
        _report_server(server)
        return
    from tot.decoders.machine import free_memory
    from tot.decoders.models.model_names import list_models

    shown, free = console(), free_memory("cpu")
    for entry in list_models():
        place = entry.where if entry.where is not None else "not installed"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        large = f"larger than the free memory, {free / 2**30:.1f} GiB" if entry.size > free else ""
        shown.print("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note, large))))


def pull_command(
    model: Annotated[str, typer.Argument(help="org/name or org/name:Q4_K_M on the hub, or any name for --model.")],
) -> None:
    """Download a model, or the rest of an interrupted download, and print its place."""
    from tot.decoders.models.model_names import find_model

    console().print(f"{model}: {find_model(model)}")


def _report_server(server: str) -> None:
    """Print how a server differs from OpenAI's protocol, and its models."""
    from tot.decoders.decoder import load_decoder

    with load_decoder("openai", "", base_url=server) as decoder:
        names = ", ".join(decoder.served_models[:20]) or "none listed (an address usually ends in /v1)"
        rows = [*decoder.server.rows(), ("models", names)]
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console().print(table)


_PARTS = {
    "models": "packed weights",
    "native": "compiled kernels",
    "prefixes": "keys and values of prompts",
    "sha256": "hashes of model files",
    "peers": "weights for benchmarks",
}
"""The folders that tot makes in the cache folder."""


def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Delete it.")] = False,
) -> None:
    """Show the cache folder and the size of its parts; with --clear, delete them."""
    from tot.decoders.cache import cache_folder

    folder, page = cache_folder(), console()
    parts = [folder / name for name in _PARTS if (folder / name).is_dir() and not (folder / name).is_symlink()]
    for part in parts:
        page.print(f"{_size(part) / 2**20:10,.1f} MiB  {part.name}: {_PARTS[part.name]}")
    page.print(f"{sum(map(_size, parts)) / 2**20:10,.1f} MiB  in {folder}")
    if not clear:
        return
    for part in parts:
        try:
            shutil.rmtree(part)
        except OSError as error:
            raise TaskError(f"Cannot delete {part}: {reason(error)}. Close the programs that use it.") from None
    page.print("Deleted.")


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if not file.is_dir() or file.is_symlink())
