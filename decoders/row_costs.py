"""What a forward costs by its number of rows, measured on the machine and the model at hand, once a process."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.kv_tree import KVTreeFullError
from tot.decoders.engine.loading import LoadedModel
from tot.decoders.engine.runner import Feed, Runner
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.outlook import Costs

ROWS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT = 128
_DRAW = Draw(1.0, 0, 1.0, 0.0, 0, 0, 0)
_UNKNOWN = (1, 1.0)
"""Rows and seconds where nothing fits: whatever is drafted for such a target pays, and such a draft never does."""
_known: WeakKeyDictionary[Any, dict[int, float]] = WeakKeyDictionary()
"""By model: seconds by rows."""


def row_costs(runner: Runner, rows: Sequence[int] = ROWS) -> Costs:
    """Seconds of one forward and its sampling by rows, each row a branch of its own after a common text: the median of
    three. Takes less than a second for a small model; must be called where the runner is not at work."""
    known = _known.setdefault(runner.model, {})
    for count in rows:
        if count not in known and (seconds := _seconds(runner, count)) is not None:
            known[count] = seconds
    return Costs.fit(list(known.items()) or [_UNKNOWN])


def _seconds(runner: Runner, rows: int) -> float | None:
    """None where so many rows do not fit just now."""
    tree = runner.tree
    if rows >= runner.model.get_input_embeddings().num_embeddings:  # each row is a token of its own
        return None
    base = tree.open()
    spent = []
    try:
        tree.extend(base, [0] * min(_CONTEXT, max(1, tree.capacity // 4)))
        runner.forward([Feed(base, tree.computed_length(base), len(base), [_DRAW])])
        for _ in range(4):
            forks = [tree.fork(base) for _ in range(rows)]
            try:
                for token, fork in enumerate(forks):
                    tree.extend(fork, [1 + token])
                began = time.perf_counter()
                forward = runner.forward([Feed(fork, len(base), len(fork), [_DRAW]) for fork in forks])
                read(forward.logits, [_DRAW] * len(forward.logits))
                spent.append(time.perf_counter() - began)
            finally:
                for fork in forks:
                    tree.rollback(fork, 0)
    except KVTreeFullError:
        pass  # a store too small for so many rows will not see them, one that is in use may later
    finally:
        tree.rollback(base, 0)
    return statistics.median(spent[1:]) if spent else None


def engine_costs(engine: Engine, rows: Sequence[int] = ROWS) -> Costs:
    """`row_costs` of an engine's model, also while the engine is at work."""
    if not set(rows) <= _known.get(engine.runner.model, {}).keys():
        return engine.call(partial(row_costs, engine.runner, rows))
    return row_costs(engine.runner, rows)


def warn_if_slow(draft: LoadedModel, runner: Runner, engine: Engine) -> None:
    """A draft that takes as long as its target can only lose."""
    drafting, verifying = row_costs(runner, (1,)).of(1), engine_costs(engine, (1,)).of(1)
    if drafting >= verifying:
        warnings.warn(
            f"the draft {draft.name} takes {drafting * 1000:.1f} ms a token and the target {engine.loaded.name} "
            f"{verifying * 1000:.1f} ms: drafting will not make it faster; choose a smaller draft",
            stacklevel=4,
        )
