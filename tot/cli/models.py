"""`tot models`: list the available models."""

from __future__ import annotations


def models_command() -> None:
    """List the available models and their locations."""
    from tot.decoders.models.model_names import list_models
    from tot.report.terminal import console

    output = console()
    for entry in list_models():
        place = entry.where if entry.where is not None else "not here"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        output.print("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note))))
