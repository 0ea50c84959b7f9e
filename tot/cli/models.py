"""`tot models`: the models that can be loaded here."""

from __future__ import annotations


def models_command() -> None:
    """List the models that can be loaded here, and where they are."""
    from tot.decoders.models.model_names import list_models
    from tot.report.terminal import console

    shown = console()
    for entry in list_models():
        place = entry.where if entry.where is not None else "not here"
        size = f"{entry.size / 2**20:.0f} MiB" if entry.size else ""
        shown.print("  ".join(filter(None, (entry.name, entry.kind, size, str(place), entry.note))))
