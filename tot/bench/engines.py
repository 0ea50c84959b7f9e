"""Engines that run waves of requests in this process: a decoder of ours, and the ways that transformers has.

Each measures itself, around the work alone, from nothing: what it computed in one run is not left for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch

from tot.bench.harness import Measured, Metric, percent, timed
from tot.bench.workloads import AskedWork, Waves, drawn, new_tokens, requests
from tot.decoders.budget import Metrics
from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import TotError
from tot.decoders.machine import describe
from tot.decoders.request import Purpose
from tot.running import in_daemon_thread

SPENT = [
    Metric(name, lambda took, name=name: _share(took["spent"], name), percent)  # type: ignore[misc]
    for name in ("draft", "verify", "sampling", "scheduling")
]
"""What an engine's time went on."""


class SideError(TotError):
    """A side that can't be had, or can't go on; the others can."""


def about(engine: Engine) -> str:
    """What runs: versions, number format, and how weights are kept."""
    return f"{describe(engine.loaded.device, engine.loaded.dtype)}, {engine.runner.backend.name}"


def _share(spent: Mapping[str, float], name: str) -> float | None:
    return spent.get(name, 0.0) / sum(spent.values()) if any(spent.values()) else None


def metrics_of(engine: Engine, purpose: Purpose = "generate") -> Metrics:
    """What the requests of a purpose cost, with all of the last step."""
    return engine.call(lambda: engine.accounts[purpose])


def forget(decoder: LocalDecoder) -> None:
    """No keys and values are left of what was computed before, nor what was counted."""
    engine, drafter = decoder.engine, decoder.drafter
    engine.call(engine.cache.clear)
    if drafter is not None and drafter.runner is not None:
        engine.call(drafter.runner.cache.clear)
    engine.call(engine.accounts.clear)


def replay(decoder: LocalDecoder, waves: Waves) -> Measured:
    """Every wave packed, choices really scored; with what was drafted of what was generated."""
    forget(decoder)
    batches = [list(requests(wave)) for wave in waves]
    seconds, done = timed(lambda: [completion for batch in batches for completion in decoder.generate(batch)])
    account = metrics_of(decoder.engine)
    drafts = {"acceptance": account.acceptance_rate} if account.reached else {}
    return checked(seconds, sum(len(completion.tokens) for completion in done), new_tokens(waves)) | drafts


def generate(model: Any, waves: Waves, *, serial: bool = False, **options: Any) -> Measured:
    """transformers' `generate`: a wave as one left-padded batch or, `serial`, a sample at a time."""

    @torch.inference_mode()
    def work() -> int:
        batches = [[[row] for row in _rows(wave)] if serial else [_rows(wave)] for wave in waves]
        return sum(_draw(model, batch, options) for wave in batches for batch in wave)

    seconds, tokens = in_thread(lambda: timed(work))
    return checked(seconds, tokens, drawn(waves))


def _rows(wave: Sequence[AskedWork]) -> list[tuple[tuple[int, ...], int]]:
    """Every sample of a wave by itself, as its prompt and its length; an evaluation is one token that is read."""
    return [(asked.prompt, length) for asked in wave for length in asked.samples]


def _draw(model: Any, rows: Sequence[tuple[tuple[int, ...], int]], options: dict[str, Any]) -> int:
    """Tokens drawn; rows that have theirs are computed until the last one has."""
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
    made = result.shape[1] - width
    return sum(min(made, length) for _, length in rows)


def in_thread(work: Callable[[], Any]) -> Any:
    """In a thread of its own, as the engine's is: OpenMP keeps a team a thread, and two teams slow each other down.

    Ctrl-C does not wait for its end.
    """
    return in_daemon_thread(work, "tot-bench").result()


def checked(seconds: float, tokens: int, wanted: int) -> Measured:
    """What was measured. Raises SideError for another number of tokens than was asked for."""
    if tokens != wanted:
        raise SideError(f"it drew {tokens} tokens where {wanted} were asked for")
    return {"seconds": seconds, "tokens": tokens}


def resident(pid: int | None = None) -> int:
    """Bytes of memory that a process and all it started hold, mapped files included; without `pid`, this one alone."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *(process.children(recursive=True) if pid else ())))
