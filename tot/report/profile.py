"""A profile as two tables: seconds by part and purpose, and what the forwards did beside what the machine can do."""

from __future__ import annotations

from collections import defaultdict

from rich.table import Table

from tot.report.profiling import Profile
from tot.report.terminal import console

_PARTS = {
    "loading": "loading the model",
    "prefill": "prefill",
    "decode": "decode",
    "verify": "verify",
    "draft": "draft",
    "sampling": "sampling",
    "commit": "text and stops",
    "scheduling": "scheduling",
    "between steps": "search, templates, waiting",
}
_FORWARD = ("prefill", "decode", "verify")
_AT = {"linear": "linear layers", "attention": "attention", "": "everything else"}


def show_profile(profile: Profile, on_stderr: bool = False) -> None:
    """Print where the time went."""
    shown = console(width=120, stderr=on_stderr)
    shown.print(_seconds(profile))
    shown.print(_achieved(profile))


def _seconds(profile: Profile) -> Table:
    """Seconds: a row a part, then a row for each of what forwards were at; a column a purpose."""
    by_part: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    within: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (purpose, part, at), seconds in profile.seconds().items():
        by_part[part][purpose] += seconds
        if part in _FORWARD:
            within[at][purpose] += seconds
    purposes = list(dict.fromkeys(purpose for row in by_part.values() for purpose in row if purpose))
    total = sum(sum(row.values()) for row in by_part.values())
    table = Table(
        title="where the time went, in seconds", caption="of a forward's time, each purpose has its rows' share"
    )
    table.add_column("part")
    for heading in (*purposes, "all", "share"):
        table.add_column(heading, justify="right")

    def add(name: str, row: dict[str, float], last: bool = False) -> None:
        cells = [f"{row[purpose]:.2f}" if purpose in row else "" for purpose in purposes]
        whole = sum(row.values())
        table.add_row(name, *cells, f"{whole:.2f}", f"{whole / total:.1%}" if total else "", end_section=last)

    everything: defaultdict[str, float] = defaultdict(float)
    for part in _PARTS:
        if part in by_part:
            add(_PARTS[part], by_part[part], last=part == "between steps")
        for purpose, seconds in by_part.get(part, {}).items():
            everything[purpose] += seconds
    add("total", everything, last=True)
    for at in sorted(within, key=lambda at: (at == "", -sum(within[at].values()))):
        add(f"forwards: {_AT.get(at, at)}", within[at])
    return table


def _achieved(profile: Profile) -> Table:
    """What the forwards did in a second, of what the machine does."""
    bandwidth, rate = profile.peak
    table = Table(
        title="forwards, and what the machine can do",
        caption=f"peak, measured just now: {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.1f} GFLOP/s in products of "
        f"matrices\n{profile.machine}",
    )
    table.add_column("forwards")
    for heading in ("number", "rows", "seconds", "GB/s, of peak", "GFLOP/s, of peak", "of the limit"):
        table.add_column(heading, justify="right")
    for name, found in profile.achieved().items():
        moved, done = found.bytes / found.seconds, found.operations / found.seconds
        table.add_row(
            *(name, f"{found.forwards}", f"{found.rows}", f"{found.seconds:.2f}"),
            f"{moved / 1e9:.2f}, {moved / bandwidth:.0%}",
            f"{done / 1e9:.2f}, {done / rate:.0%}",
            f"{found.limit / found.seconds:.0%}",
        )
    return table
