"""Terminal output: progress and trees.

`console`, `complain` and `PlainFormatter` print external text (models, data, files, names) without markup and control
characters, so callers need not escape it.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, ProgressColumn, Task, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Column
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from tot.tree.tree import Node, ThoughtTree

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class _PlainConsole(Console):
    """A console that replaces control characters in all printed text, and ignores markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)  # before widths are measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def console(width: int = 150, stderr: bool = False) -> Console:
    """Return the console for a command's output. Long lines are not wrapped; `width` is the table width in pipes."""
    stream = sys.stderr if stderr else sys.stdout
    return _PlainConsole(stderr=stderr, soft_wrap=True, width=None if stream.isatty() else width)


def complain(line: str) -> None:
    """Write a line to standard error, without control characters."""
    sys.stderr.write(f"{plain(line)}\n")
    sys.stderr.flush()


class PlainFormatter(logging.Formatter):
    """Formats log records without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class _Note(ProgressColumn):
    """A column that calls `note` for its text at every refresh."""

    def __init__(self, note: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._note = note

    def render(self, task: Task) -> Text:
        return Text(self._note(), style="dim")


def progress(note: Callable[[], str], *columns: ProgressColumn, total: int | None = None) -> Bars:
    """Return a progress line on standard error with one task, these columns and the text of `note()`.

    Prints nothing in a pipe.
    """
    screen = console(stderr=True)
    silent = not screen.is_terminal
    bars = Bars(*columns, _Note(note), console=screen, disable=silent, transient=True, refresh_per_second=8)
    bars.add_task("", total=total)
    return bars


@contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar, and yield a function (done, note, total) that updates it; the total is optional."""
    text = what
    with progress(lambda: text, BarColumn(), TimeRemainingColumn(), total=total) as bars:

        def tell(done: int, note: str, of: int | None = total) -> None:
            nonlocal text
            text = f"{what}: {note}"
            bars.update(bars.task_ids[0], completed=done, total=of)

        yield tell


def plain(text: str) -> str:
    """Replace control characters, which could rewrite the terminal, and lone surrogates."""
    return _CONTROL.sub("�", text)


def tree_text(tree: ThoughtTree, most: int = 50) -> str:
    """Render a tree as lines of text, with at most `most` thoughts."""
    text = io.StringIO()
    print_tree(_PlainConsole(file=text, width=100, color_system=None, force_jupyter=False), tree, most)
    return text.getvalue().rstrip("\n")


def print_tree(page: Console, tree: ThoughtTree, most: int = 50) -> None:
    """Print at most `most` thoughts, one per line, cut to the page width: the chosen path, then the first thoughts."""
    first = sorted(tree, key=lambda node: (not node.chosen, node.id))[: most + 1]
    kept = {step.id for node in first for step in tree.path(node)}
    top = Tree(Text(brief(tree.state(tree.root).question, 120), style="bold"), guide_style="dim")
    branches = {tree.root.id: top}
    for node in tree:
        if node.parent is not None and node.id in kept:
            branches[node.id] = branches[node.parent].add(label(node))
    page.print(top, soft_wrap=False, no_wrap=True, overflow="ellipsis")
    if len(kept) < len(tree):
        page.print(f"… and {len(tree) - len(kept)} more thoughts")


def label(node: Node) -> Text:
    """Return a thought on one line, with its value, visits and answer."""
    value = "  –  " if node.value is None else f"{node.value:5.2f}"
    text = Text(f"{'★' if node.chosen else '·'} {value}  ", style="bold green" if node.chosen else "cyan")
    assert node.thought is not None
    if node.visits:
        text.append(f"{node.visits} visits  ", style="dim")
    if node.answer is not None:
        share = "" if node.share is None else f" ({node.share:.0%} of votes)"
        text.append(f"{brief(node.answer)}{share}  ", style="bold")
    observed = node.thought.observation
    short = observed is not None or node.answer is not None
    thought = " → ".join(node.thought.parts.values())
    text.append(brief(thought, 60 if short else 120), style="default")
    if observed is not None:
        text.append(f" ⇒ {brief(observed.text)}", style="green" if observed.verified else "yellow")
    return text


def brief(text: str, most: int = 60) -> str:
    """The beginning of a text, on one line, without control characters."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"
