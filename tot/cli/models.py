"""`tot models` and `tot cache`: the models that `--model` takes, and the space that the cache takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from tot.decoders.errors import TaskError, reason
from tot.report.terminal import console


def models_command() -> None:
    """List the names that --model takes here without a download."""
    from tot.decoders.models.model_names import list_models

    shown = console()
    for entry in list_models():
        place = entry.where if entry.where is not None else "not installed"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        shown.print("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note))))


def cache_command(
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete everything in it. It is made again when needed.")
    ] = False,
) -> None:
    """Show the cache folder and the size of its parts; with --clear, delete them."""
    from tot.decoders.models.gguf_cache import cache_folder

    folder, page = cache_folder(), console()
    parts = sorted(path for path in folder.glob("*")) if folder.is_dir() else []
    for part in parts:
        page.print(f"{_size(part) / 2**20:10,.1f} MiB  {part.name}")
    page.print(f"{sum(map(_size, parts)) / 2**20:10,.1f} MiB  in {folder}")
    if clear:
        for part in parts:
            try:
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
            except OSError as error:
                raise TaskError(f"Cannot delete {part}: {reason(error)}. Close the programs that use it.") from None
        page.print("Deleted.")


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if not file.is_dir() or file.is_symlink())
