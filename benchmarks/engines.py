"""Engines that run waves of requests in this process: one of our decoders, and transformers' `generate`.

Each run starts with an empty cache and times only the decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psutil
import torch

from benchmarks.harness import Measured, timed
from benchmarks.workloads import AskedWork, Waves, drawn, new_tokens, requests
from tot.api import asolve
from tot.config import SearchConfig
from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import TotError
from tot.decoders.machine import describe
from tot.decoders.request import Usage
from tot.running import in_daemon_thread, run_to_end
from tot.solution import Solution
from tot.task.task import Task


class SideError(TotError):
    """A side is not available or failed; the other sides are not affected."""


def about(engine: Engine) -> str:
    """Describe the software versions, the number format and the weight backend."""
    return f"{describe(engine.loaded.device, engine.loaded.dtype)}, {engine.runner.backend.name}"


def forget(decoder: LocalDecoder) -> None:
    """Clear the key-value caches and the counters."""
    engine, drafter = decoder.engine, decoder.drafter
    engine.call(engine.cache.clear)
    if drafter is not None and drafter.runner is not None:
        engine.call(drafter.runner.cache.clear)
    engine.call(engine.accounts.clear)


def local_decoders(config: SearchConfig, stack: ExitStack) -> list[LocalDecoder]:
    """Open a run's models, and return the decoders of this process."""
    opened = {id(one): one for one in config.open(stack).values()}
    return [one for one in opened.values() if isinstance(one, LocalDecoder)]


def searched(
    decoders: Sequence[LocalDecoder], task: Task, question: str, config: SearchConfig | None = None, **options: Any
) -> tuple[float, Solution]:
    """Search a question with empty caches, and return the seconds and the solution. A stopped search raises."""
    for decoder in decoders:
        forget(decoder)
    return timed(lambda: run_to_end(asolve(task, question, config, **options)))


def replay(decoder: LocalDecoder, waves: Waves) -> Measured:
    """Run every wave packed, score choices exactly, and report the acceptance rate of drafts."""
    forget(decoder)
    batches = [list(requests(wave)) for wave in waves]
    seconds, done = timed(lambda: [completion for batch in batches for completion in decoder.generate(batch)])
    usage = sum((completion.usage for completion in done), Usage())
    drafts = {} if usage.acceptance_rate is None else {"acceptance": usage.acceptance_rate}
    return checked(seconds, sum(len(completion.tokens) for completion in done), new_tokens(waves)) | drafts


def generate(model: Any, waves: Waves, *, serial: bool = False, **options: Any) -> Measured:
    """Run transformers' `generate`: one left-padded batch per wave or, if `serial`, one sample at a time."""

    @torch.inference_mode()
    def work() -> int:
        batches = [[[row] for row in _rows(wave)] if serial else [_rows(wave)] for wave in waves]
        return sum(_draw(model, batch, options) for wave in batches for batch in wave)

    # a thread of its own, as the engine has: OpenMP keeps a team per thread, and two teams compete
    seconds, tokens = in_daemon_thread(lambda: timed(work), "tot-bench").result()
    return checked(seconds, tokens, drawn(waves))


def _rows(wave: Sequence[AskedWork]) -> list[tuple[tuple[int, ...], int]]:
    """Return (prompt, new tokens) of every sample of a wave; an evaluation counts as one token."""
    return [(request.prompt, length) for request in wave for length in request.samples]


def _draw(model: Any, rows: Sequence[tuple[tuple[int, ...], int]], options: dict[str, Any]) -> int:
    """Return the number of tokens sampled. All rows run until the longest one is complete."""
    width, longest = max(len(prompt) for prompt, _ in rows), max(length for _, length in rows)
    padded = [([0] * (width - len(prompt)) + list(prompt)) for prompt, _ in rows]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows]
    result = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        **{"do_sample": True, "temperature": 1.0, "top_k": 0} | options,
        min_new_tokens=longest,
        max_new_tokens=longest,
    )
    new = result.shape[1] - width
    return sum(min(new, length) for _, length in rows)


def checked(seconds: float, tokens: int, wanted: int) -> Measured:
    """Return the measurement. Raises SideError if `tokens` differs from `wanted`."""
    if tokens != wanted:
        raise SideError(f"it sampled {tokens} tokens instead of {wanted}")
    return {"seconds": seconds, "tokens": tokens}


def resident(pid: int | None = None) -> int:
    """Return the resident bytes, mapped files included, of a process and its children; by default of this process."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *(process.children(recursive=True) if pid else ())))
