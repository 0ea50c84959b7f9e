"""Our engine as a side: every measurement starts with empty caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.harness import timed
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.machine import describe
from tot.decoders.timeline import Timeline
from tot.llm.decoders import open_decoders
from tot.running import run_to_end
from tot.solution import Solution
from tot.task.task import Task


def about(engine: Engine) -> str:
    """Describe the software versions, the number format and the weight backend."""
    return f"{describe(engine.loaded.device, engine.loaded.dtype)}, {engine.runner.backend.name}"


@contextmanager
def timed_parts(engine: Engine) -> Iterator[Timeline]:
    """Record the times of drafting, forwards and sampling."""
    engine.timeline = timeline = Timeline()
    yield timeline
    engine.timeline = None


def forget(decoder: LocalDecoder) -> None:
    """Clear the key-value caches and the counters."""
    engine, drafter = decoder.engine, decoder.drafter
    engine.call(engine.cache.clear)
    if drafter is not None and drafter.runner is not None:
        engine.call(drafter.runner.cache.clear)


def local_decoders(config: SearchConfig, stack: ExitStack) -> list[LocalDecoder]:
    """Open a run's models, and return the decoders of this process."""
    opened = {id(one): one for one in open_decoders(config.model, stack).values()}
    return [one for one in opened.values() if isinstance(one, LocalDecoder)]


def searched(
    decoders: Sequence[LocalDecoder], task: Task, question: str, config: SearchConfig
) -> tuple[float, Solution]:
    """Search a question with empty caches, and return the seconds and the solution. A stopped search raises."""
    for decoder in decoders:
        forget(decoder)
    return timed(lambda: run_to_end(run_search(task, question, config)))
