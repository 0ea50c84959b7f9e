"""What a forward costs by its rows and by what they see, measured on the machine and the model at hand.

Measured when it is first asked for, and kept in the cache folder as long as machine, model and engine stay the same.
What was measured while others wanted the processor, or memory was short, serves this process only.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tot.decoders.drafting.kept import Kept, machine_identity, model_identity, named
from tot.decoders.drafting.planner import FAR, NEAR, LatencyModel
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.models.loading import LoadedModel

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
FAR_ROWS = (1, 8, 64)
"""What a long context adds is measured at these."""
_BRANCHES = 64
"""More rows than that are several tokens on each of so many branches, as drafts and prompts are."""
_LONG = 0.4
"""Seconds of a forward beyond which more rows are not measured."""
_ENOUGH = 0.5
"""Seconds after which a point is not measured once more."""
_SWITCHES = 50.0
"""Times a second that the system took the processor from this process for another: more, and others are at work."""
_DRAW = Draw(1.0, 0, 1.0, 0.0, 0, 0, 0)
_UNKNOWN = (1, 1.0)
"""Rows and seconds where nothing fits: whatever is drafted for such a target pays, and such a draft never does."""
Point = tuple[int, int]
"""Rows, and tokens of context."""
_known: WeakKeyDictionary[Any, dict[Point, float]] = WeakKeyDictionary()
"""By model: seconds by point."""


def latency_model(runner: Runner, rows: Sequence[int] = ROWS) -> LatencyModel:
    """Seconds of one forward and its sampling by rows, each row on a branch after a common text: the least of three,
    or of fewer where they take long, as whatever disturbs a forward adds to it.

    Takes a few seconds for a small model, once; must be called where the runner is not at work.
    """
    known = _known.setdefault(runner.model, {})
    if _missing(runner, rows):
        _learn(runner, rows, known)
    near = [(count, seconds) for (count, context), seconds in known.items() if context == NEAR]
    far = [(count, seconds) for (count, context), seconds in known.items() if context == FAR]
    return LatencyModel.fit(near or [_UNKNOWN], far)


def _learn(runner: Runner, rows: Sequence[int], known: dict[Point, float], again: bool = False) -> None:
    if named(runner.model):
        _share(runner, rows, known, again)
    else:
        _measure(runner, rows, known)


def _share(runner: Runner, rows: Sequence[int], known: dict[Point, float], again: bool = False) -> None:
    """Add to what is known what another process has measured, or else (or `again`) measure it for others too."""
    kept = Kept("costs", model_identity(runner.model) | machine_identity(runner))
    with kept.alone():  # another may be measuring
        known |= {point: seconds for point, seconds in _read(kept).items() if not (again and point[0] in rows)}
        before = len(known)
        quiet = _measure(runner, rows, known)
        if len(known) > before and quiet and _room(runner, NEAR) == NEAR:  # else they are of a shorter context
            kept.write([[*point, seconds] for point, seconds in sorted(known.items())])


def _missing(runner: Runner, rows: Collection[int]) -> list[Point]:
    points = [(count, NEAR) for count in rows]
    if _room(runner, FAR) == FAR:
        points += [(count, FAR) for count in FAR_ROWS if count in rows]
    known = _known.get(runner.model, {})
    return [point for point in points if point not in known and _worth(point, known)]


def _worth(point: Point, known: Mapping[Point, float]) -> bool:
    """Where fewer rows take long already, more take longer in a straight line, and what they see adds little."""
    slow = min((rows for (rows, context), seconds in known.items() if context == NEAR and seconds > _LONG), default=0)
    return not slow or (point[0] <= slow and (point[1] == NEAR or slow > _BRANCHES))


def _room(runner: Runner, context: int) -> int:
    """Tokens of context that are measured with, where so many are wanted."""
    return min(context, max(1, runner.cache.capacity // 4), max(1, runner.context // 2))


def _read(kept: Kept) -> dict[Point, float]:
    try:
        found = {(int(rows), int(context)): float(seconds) for rows, context, seconds in kept.read()}
        if all(0.0 < seconds < math.inf for seconds in found.values()):
            return found
    except (TypeError, ValueError):
        pass
    log.info("%s holds no measurements: it is made anew", kept.path)
    return {}


def _measure(runner: Runner, rows: Sequence[int], known: dict[Point, float]) -> bool:
    """Add those points that are missing, as far as they fit just now. False where others disturbed it."""
    cache = runner.cache
    began, before = time.perf_counter(), _disturbances()
    for context in (NEAR, FAR):
        counts = sorted(count for count, seen in _missing(runner, rows) if seen == context)
        if not counts:
            continue
        base = cache.open()
        try:
            cache.extend(base, [0] * _room(runner, context))
            first = runner.forward([Chunk(base, cache.computed_length(base), len(base), [_DRAW])])
            read(first.logits, [_DRAW])  # what has to be compiled for it is compiled now
            for count in counts:
                if _worth((count, context), known) and (seconds := _seconds(runner, base, count)) is not None:
                    known[count, context] = seconds
        except RadixCacheFullError:
            pass
        finally:
            cache.rollback(base, 0)
    switches, faults = (now - then for now, then in zip(_disturbances(), before, strict=True))
    seconds = time.perf_counter() - began
    quiet = not faults and switches <= _SWITCHES * seconds
    if not quiet:
        log.info("not kept, measured beside others: %d switches, %d faults in %.1f s", switches, faults, seconds)
    return quiet


def _disturbances() -> tuple[int, int]:
    """Since this process began: how often another took the processor, and how often memory had to be read from disk."""
    if sys.platform == "win32":
        return 0, 0
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nivcsw, usage.ru_majflt


def _seconds(runner: Runner, base: Branch, rows: int) -> float | None:
    """None where so many rows do not fit just now."""
    cache = runner.cache
    length = -(-rows // _BRANCHES)
    branches = rows // length
    if branches >= runner.model.get_input_embeddings().num_embeddings:  # each branch begins with a token of its own
        return None
    spent = []
    for _ in range(4):
        forks = [cache.fork(base) for _ in range(branches)]
        try:
            for token, fork in enumerate(forks):
                cache.extend(fork, [1 + token] + [0] * (length - 1))
            began = time.perf_counter()
            forward = runner.forward([Chunk(fork, len(base), len(fork), [_DRAW] * length) for fork in forks])
            read(forward.logits, [_DRAW] * len(forward.logits))
            spent.append(time.perf_counter() - began)
            if len(spent) > 1 and sum(spent) > _ENOUGH:
                break
        except RadixCacheFullError:  # a store too small for so many rows will not see them, one in use may later
            return None
        finally:
            for fork in forks:
                cache.rollback(fork, 0)
    return min(spent[1:] or spent)  # the first one warms up


def engine_costs(engine: Engine, rows: Sequence[int] = ROWS) -> LatencyModel:
    """`latency_model` of an engine's model, also while the engine is at work."""
    if _missing(engine.runner, rows):
        return engine.call(partial(latency_model, engine.runner, rows))
    return latency_model(engine.runner, rows)


def warn_if_slow(draft: LoadedModel, runner: Runner, engine: Engine) -> None:
    """A draft that takes as long as its target can only lose. That is measured again before it is said: the two may
    have been measured beside different things."""
    for again in (False, True):
        if again:
            _measure_anew(runner)
            engine.call(partial(_measure_anew, engine.runner))
        drafting, verifying = latency_model(runner, (1,)).of(1), engine_costs(engine, (1,)).of(1)
        if drafting < verifying:
            return
    warnings.warn(
        f"the draft {draft.name} takes {drafting * 1000:.1f} ms a token and the target {engine.loaded.name} "
        f"{verifying * 1000:.1f} ms: drafting will not make it faster; choose a smaller draft",
        stacklevel=4,
    )


def _measure_anew(runner: Runner) -> None:
    """What one row takes just now."""
    known = _known.setdefault(runner.model, {})
    for point in [point for point in known if point[0] == 1]:
        del known[point]
    _learn(runner, (1,), known, again=True)
