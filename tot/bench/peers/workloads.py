"""The two workloads: branches of one prompt, and whole searches that are recorded here and replayed by every side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from tot.bench.peers.goals import LLAMA
from tot.bench.peers.here import Tot
from tot.bench.peers.questions import QUESTIONS
from tot.bench.peers.side import Side, branches
from tot.bench.peers.turns import Results, Turns
from tot.bench.peers.waves import Wave, record
from tot.data import rows
from tot.decoders.errors import OptionError
from tot.task import Task

BREADTH, DEPTH = 3, 4
_WARM_UP_TOKENS, _WARM_UP_WAVES = 8, 3
_WARM_UP_PLACE = 500
"""Prompts are rotated by less in the rounds, and by more in the warm-up."""

Say = Callable[[str], None]


def decode(turns: Turns, ids: Sequence[int], new: int, rounds: int, say: Say) -> None:
    """Branches of a prompt that no one has seen, another one in every cell."""
    places = {count: i for i, count in enumerate(turns.results.columns)}

    def asking(count: int, turn: int) -> Sequence[Wave]:
        return branches(rotated(ids, turn * len(places) + places[count] + 1), count, new)

    def warming(count: int, turn: int) -> Sequence[Wave]:
        return branches(rotated(ids, _WARM_UP_PLACE + places[count]), count, min(_WARM_UP_TOKENS, new))

    say("decode, warm-up …")
    turns.warm_up(warming)
    for turn in range(rounds):
        turns.round(turn, asking)


def rotated(ids: Sequence[int], by: int) -> list[int]:
    """The same tokens from another one on: they share no beginning with other rotations."""
    by %= len(ids)
    return [*ids[by:], *ids[:by]]


def trees(
    turns: Turns, ours: Tot, task: Task, questions: Sequence[str], solved: dict[int, list[float]], say: Say
) -> None:
    """A problem a round. `solved` gets the seconds of our own `solve()`, which is where the waves are recorded."""
    options = {"breadth": BREADTH, "depth": DEPTH}
    counts = turns.results.columns
    say("tree, warm-up …")
    short = record(ours.decoder, task, questions[-1], min(counts), **options).waves[:_WARM_UP_WAVES]
    turns.warm_up(lambda thoughts, turn: short)
    for turn, question in enumerate(questions):
        recorded = {thoughts: record(ours.decoder, task, question, thoughts, **options) for thoughts in counts}
        for thoughts, recording in recorded.items():
            solved.setdefault(thoughts, []).append(recording.seconds)
            say(f"round {turn + 1}: {thoughts}: solve() here: {recording.seconds:.1f} s")
        waves = {thoughts: recording.waves for thoughts, recording in recorded.items()}
        turns.round(turn, lambda thoughts, _: waves[thoughts])  # noqa: B023  (asked before the next question)


def searchers(sides: Sequence[Side], decoded: Results | None) -> list[Side]:
    """The sides that can do a search; of llama.cpp's precisions the one that decoded fastest at most branches."""
    able = [side for side in sides if side.searches]
    llamas = [side.name for side in able if side.name.startswith(LLAMA)]
    found = (decoded.fastest(llamas, column) for column in reversed(decoded.columns)) if decoded is not None else ()
    best = next(filter(None, found), llamas[0] if llamas else None)
    return [side for side in able if side.name not in llamas or side.name == best]


def questions_of(task: Task, data: Path | None, count: int) -> list[str]:
    """The first questions of the data, or made-up ones. Raises OptionError where there are none."""
    if data is None:
        return list(QUESTIONS[:count])
    found = [task.question_of(row) for row in islice(rows(data), count)]
    if not found:
        raise OptionError(f"{data} has no rows: give a file with questions, or leave --data out")
    return found
