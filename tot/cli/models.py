"""`tot models` and `tot cache`: the models that `--model` takes, and the space that the cache takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tot.decoders.errors import OptionError, TaskError, reason
from tot.report.terminal import console


def models_command(
    server: Annotated[
        str | None, typer.Option("--server", help="Address of a server, to report its abilities: http://host:port/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model's name on the server.")] = None,
) -> None:
    """List the names that --model takes here without a download; with --server, report that server's abilities."""
    if server is not None:
        _report_abilities(server, model)
        return
    if model is not None:
        raise OptionError(f"--model {model} has an effect only with --server: give the server's address")
    from tot.decoders.models.model_names import list_models

    shown = console()
    for entry in list_models():
        place = entry.where if entry.where is not None else "not installed"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        shown.print("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note))))


def _report_abilities(server: str, model: str | None) -> None:
    """Print the abilities of a server for a model, and the effect of each."""
    from tot.decoders.decoder import load_decoder
    from tot.decoders.remote.abilities import EFFECTS

    if model is None:
        with load_decoder("openai", "", base_url=server) as decoder:
            names = decoder.served_models
        if len(names) != 1:
            known = ", ".join(names[:20]) or "no model (an address usually ends in /v1)"
            raise OptionError(f"the server at {server} lists {known}: choose one with --model NAME")
        model = names[0]
    with load_decoder("openai", model, base_url=server) as decoder:
        abilities = decoder.probe()
    table = Table.grid(padding=(0, 2))
    for ability, (name, with_it, without) in EFFECTS.items():
        found = abilities.get(ability)
        table.add_row(name, *("unknown", "") if found is None else ("yes", with_it) if found else ("no", without))
    console().print(table)


_PARTS = {
    "models": "packed weights",
    "native": "compiled kernels",
    "prefixes": "keys and values of prompts",
    "latency": "measured latencies",
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
