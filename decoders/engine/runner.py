"""Runner: one model over one RadixCache, and the packed forward that computes any set of branches at once.

Linear layers see all new tokens as one row of a batch. A token that two branches share is computed once. The runner
knows nothing of requests or decoding methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from tot.decoders.engine.radix_cache import SCRATCH, Branch, RadixCache
from tot.decoders.engine.sampling import Read, Sampled, read
from tot.decoders.errors import OptionError
from tot.decoders.kernels.backend import Backend, open_backend
from tot.decoders.kernels.native.tiles import Run
from tot.decoders.machine import free_memory
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.memory import MAX_TOKENS
from tot.decoders.models.shapes import Array, slot_bytes

_CPU_SHARE, _GPU_SHARE = 0.25, 0.5
"""Shares of free memory for keys and values if no budget is given; a draft model takes its share of the rest."""
_IDLE_TOKENS = 2**15
"""Tokens of finished requests whose keys and values stay cached on a CPU if no budget is given."""
_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def default_budget(free: int, device: str) -> int:
    """Return the bytes of keys and values if no budget is given, with this number of free bytes."""
    return int((_CPU_SHARE if device == "cpu" else _GPU_SHARE) * free)


@dataclass(slots=True)
class Chunk:
    """Positions `start` up to `stop` of a branch: compute the missing ones, and read the logits of the last."""

    branch: Branch
    start: int
    stop: int
    reads: Sequence[Read] = field(default=())
    """Reads of the logits at the last `len(reads)` positions."""

    @property
    def read_slots(self) -> Sequence[int]:
        return self.branch.slots[self.stop - len(self.reads) : self.stop]


@dataclass(slots=True)
class Forward:
    """The result of one forward."""

    logits: Array
    """(rows read, vocab), float32."""
    rows: list[list[int]]
    """For each chunk, the row of `logits` of each of its reads."""
    own_from: list[int]
    """For each chunk, the first position that it computed; the cache or another chunk has those before."""
    computed: int = 0
    """Number of rows that were computed."""
    keys: int = 0
    """Number of keys that the computed rows attended to, counted for each row."""

    def sample(self, chunks: Sequence[Chunk]) -> list[list[Sampled]]:
        """Serve the reads of the chunks. Returns one list per chunk."""
        reads = [item for chunk in chunks for item in chunk.reads]
        rows = [row for rows in self.rows for row in rows]
        logits = self.logits if rows == list(range(len(self.logits))) else self.logits[rows]
        sampled = iter(read(logits, reads) if reads else ())
        return [[next(sampled) for _ in chunk.reads] for chunk in chunks]


class Runner:
    """One model's backend, and the RadixCache of its key-value store."""

    def __init__(self, loaded: LoadedModel, kv_budget: int | str | None = None) -> None:
        self.loaded = loaded
        self.device, self.dtype = loaded.device, loaded.dtype
        self.context = int(loaded.config.max_position_embeddings)
        self.slot_bytes = slot_bytes(
            loaded.config, loaded.store_dtype if loaded.store_dtype is not None else loaded.dtype
        )
        """Bytes of keys and values per token."""
        self.cache = RadixCache(self._capacity(kv_budget))
        if kv_budget is None:
            self.bound_idle()
        self.backend: Backend = open_backend(loaded)
        """Computes the forwards."""
        self.on_forward: Callable[[int, int, float], None] | None = None
        """Called with rows, keys and seconds of each forward that read at least half of its rows."""
        try:
            self.backend.reserve(self.cache.capacity + 1)  # one more for SCRATCH
        except BaseException:
            self.backend.close()
            raise
        self._closed = False

    def close(self) -> None:
        """Close the backend: a transformers module gets its own attention back."""
        if not self._closed:
            self._closed = True
            self.backend.close()

    def bound_idle(self) -> None:
        """Bound the memory of finished requests on a CPU, whose store takes memory only when slots are first used."""
        if self.device == "cpu":
            self.cache.most_idle = _IDLE_TOKENS

    def _capacity(self, budget: int | str | None) -> int:
        """Return the slots of a budget in tokens (a number) or bytes ("1.5GiB"); default: a share of free memory."""
        free = free_memory(self.device)
        if budget is None:
            capacity = min(MAX_TOKENS, default_budget(free, self.device) // self.slot_bytes)
        elif isinstance(budget, str) and not budget.strip().isdigit():
            match = re.fullmatch(r"\s*([\d.]+)\s*([kmg]i?b)\s*", budget, re.IGNORECASE)
            try:
                size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
            except ValueError:
                size = 0.0
            if not size:
                raise OptionError(f'kv_budget is {budget!r}: give tokens, such as 20000, or a size, such as "1.5GiB"')
            capacity = int(size // self.slot_bytes)
        else:
            capacity = int(budget)
        if capacity < 1:
            raise OptionError(
                f"a kv_budget of {budget!r} holds {max(capacity, 0)} tokens ({self.slot_bytes} bytes each): give more"
            )
        if capacity * self.slot_bytes > free:
            raise OptionError(
                f"a kv_budget of {capacity} tokens takes {capacity * self.slot_bytes / 2**30:.1f} GiB of keys and "
                f"values, and {free / 2**30:.1f} GiB are free: give less"
            )
        return capacity

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        """Compute the missing positions of the chunks in one packed forward, and read logits.

        Positions before a chunk's `start` must be computed already, or belong to an earlier chunk of this call.
        """
        computed = self.cache.is_computed
        runs: list[Run] = []
        writes: list[list[int]] = []
        row_of: dict[int, tuple[int, int]] = {}
        run_to: dict[int, int] = {}
        """The number of the run that ends at a slot."""
        own_from: list[int] = []
        for chunk in chunks:
            slots, first_read = chunk.branch.slots, chunk.stop - len(chunk.reads)
            own = chunk.start
            while own < chunk.stop and (slots[own] in row_of or (own < first_read and computed(slots[own]))):
                own += 1
            own_from.append(own)
            if own < chunk.stop:
                new = slots[own : chunk.stop]
                # A computed token runs again only for its logits: it reads its slot and writes to none.
                write = [SCRATCH if slot in row_of or computed(slot) else slot for slot in new]
                path = np.array(slots[: chunk.stop], dtype=np.int32)
                number = run_to.pop(slots[own - 1], None) if own else None
                if number is None:
                    number = len(runs)
                    runs.append(Run(path, own))
                    writes.append(write)
                else:  # it continues another chunk: as one run, attention rounds alike, whatever was computed before
                    runs[number] = Run(path, runs[number].start)
                    writes[number] += write
                run_to[new[-1]] = number
                row_of.update((slot, (number, own - runs[number].start + i)) for i, slot in enumerate(new))
        if not runs:  # all positions are computed already, and no logits are read
            return Forward(np.empty((0, 0), np.float32), [[] for _ in chunks], own_from)
        reads = list(dict.fromkeys(row_of[slot] for chunk in chunks for slot in chunk.read_slots))
        logits = self._run(runs, writes, reads)
        logit_rows = {row: i for i, row in enumerate(reads)}
        self.cache.mark_computed(slot for write in writes for slot in write if slot != SCRATCH)
        rows = [[logit_rows[row_of[slot]] for slot in chunk.read_slots] for chunk in chunks]
        keys = sum(run.rows * len(run.path) for run in runs)
        return Forward(logits, rows, own_from, sum(run.rows for run in runs), keys)

    def observe(self, forward: Forward, seconds: float) -> None:
        """Report the time of a forward and its sampling. Prompts, of which few rows are read, do not count."""
        if self.on_forward is not None and 2 * len(forward.logits) >= forward.computed > 0:
            self.on_forward(forward.computed, forward.keys, seconds)

    def _run(self, runs: list[Run], writes: list[list[int]], reads: list[tuple[int, int]]) -> Array:
        """Pack the rows of `runs`. Returns logits (rows read, vocab)."""
        order: list[int]
        pieces: Any  # a type of the backend
        order, pieces = self.backend.cut(runs)
        first = dict(zip(order, accumulate((runs[run].rows for run in order), initial=0), strict=False))
        token = self.cache.token
        tokens = [token(slot) for run in order for slot in runs[run].path[runs[run].start :].tolist()]
        positions = [position for run in order for position in range(runs[run].start, len(runs[run].path))]
        write = [slot for run in order for slot in writes[run]]
        rows = np.array([tokens, positions, write], dtype=np.int64)
        keep = np.array([first[run] + offset for run, offset in reads], dtype=np.int64)
        return self.backend.forward(rows, keep, pieces)
