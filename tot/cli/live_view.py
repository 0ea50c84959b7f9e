"""The live view of a search in a terminal: the leading answer, the speed and the newest thoughts, redrawn in place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from tot.report.terminal import console, label
from tot.serving.live import LiveSearch, LiveSearches

_THOUGHTS, _LEVELS = 6, 5
"""Newest thoughts that are shown, and levels that are indented."""
_PER_SECOND = 4


@contextmanager
def watched(
    question: str, name: str = "tot", *, quiet: bool = False, runs: LiveSearches | None = None
) -> Iterator[LiveSearch]:
    """Yield a search with the `watch` for `run_search`, and show it on standard error, unless in a pipe or quiet."""
    screen, began = console(stderr=True), time.monotonic()
    with (runs or LiveSearches()).run(name, question) as search:
        if quiet or not screen.is_terminal:
            yield search
            return
        search.votes = True

        def view() -> Group:
            return _view(search, time.monotonic() - began)

        options: dict[str, Any] = {"transient": True, "refresh_per_second": _PER_SECOND, "redirect_stderr": False}
        with Live(get_renderable=view, console=screen, **options) as live:
            live.refresh()
            yield search


def _view(search: LiveSearch, seconds: float) -> Group:
    if (run := search.run) is None:
        return Group(_line(Text(f"{search.status['name']}: loading the model … {seconds:.0f} s", style="dim")))
    thoughts = [node for node in list(run.tree)[-_THOUGHTS:] if node.thought is not None]
    rows = [Text("  " * min(node.depth - 1, _LEVELS)).append_text(label(node)) for node in thoughts]
    heads = (Text(part, style="bold") for part in search.line.split(" · "))
    return Group(*map(_line, (*heads, *rows)))


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
