"""Engines that run waves of requests in this process: one of our decoders, and transformers' `generate`.

Each run starts with an empty cache and times only the decoding.
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
    Metric(name, lambda measured, name=name: _share(measured["spent"], name), percent)  # type: ignore[misc]
    for name in ("draft", "verify", "sampling", "scheduling")
]
"""Shares of an engine's time."""


class SideError(TotError):
    """A side is not available or failed; the other sides are not affected."""


def about(engine: Engine) -> str:
    """Describe the software versions, the number format and the weight backend."""
    return f"{describe(engine.loaded.device, engine.loaded.dtype)}, {engine.runner.backend.name}"


def _share(spent: Mapping[str, float], name: str) -> float | None:
    return spent.get(name, 0.0) / sum(spent.values()) if any(spent.values()) else None


def metrics_of(engine: Engine, purpose: Purpose = "generate") -> Metrics:
    """Return the cost of a purpose's requests, including the last step."""
    return engine.call(lambda: engine.accounts[purpose])


def forget(decoder: LocalDecoder) -> None:
    """Clear the key-value caches and the counters."""
    engine, drafter = decoder.engine, decoder.drafter
    engine.call(engine.cache.clear)
    if drafter is not None and drafter.runner is not None:
        engine.call(drafter.runner.cache.clear)
    engine.call(engine.accounts.clear)


def replay(decoder: LocalDecoder, waves: Waves) -> Measured:
    """Run every wave packed, score choices exactly, and report the acceptance rate of drafts."""
    forget(decoder)
    batches = [list(requests(wave)) for wave in waves]
    seconds, done = timed(lambda: [completion for batch in batches for completion in decoder.generate(batch)])
    account = metrics_of(decoder.engine)
    drafts = {"acceptance": account.acceptance_rate} if account.reached else {}
    return checked(seconds, sum(len(completion.tokens) for completion in done), new_tokens(waves)) | drafts


def generate(model: Any, waves: Waves, *, serial: bool = False, **options: Any) -> Measured:
    """Run transformers' `generate`: one left-padded batch per wave or, if `serial`, one sample at a time."""

    @torch.inference_mode()
    def work() -> int:
        batches = [[[row] for row in _rows(wave)] if serial else [_rows(wave)] for wave in waves]
        return sum(_draw(model, batch, options) for wave in batches for batch in wave)

    seconds, tokens = in_thread(lambda: timed(work))
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


def in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in its own thread, as the engine does: OpenMP keeps a team per thread, and two teams compete.

    Ctrl-C does not wait for the thread.
    """
    return in_daemon_thread(work, "tot-bench").result()


def checked(seconds: float, tokens: int, wanted: int) -> Measured:
    """Return the measurement. Raises SideError if `tokens` differs from `wanted`."""
    if tokens != wanted:
        raise SideError(f"it sampled {tokens} tokens instead of {wanted}")
    return {"seconds": seconds, "tokens": tokens}


def resident(pid: int | None = None) -> int:
    """Return the resident bytes, mapped files included, of a process and its children; by default of this process."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *(process.children(recursive=True) if pid else ())))
