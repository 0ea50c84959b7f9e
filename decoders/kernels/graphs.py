"""Small forwards on a GPU as CUDA graphs: asking for a model's thousand kernels one by one takes longer than they do.

Each row is an entry of its own here, which reads all of its path; rows and keys are padded to powers of two, so that
few graphs are captured.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tot.decoders.kernels.attention import ATTENTION, Block, packed_attention
from tot.decoders.kernels.native.shared_prefixes import Run
from tot.decoders.models.kv_store import SCRATCH

_MOST_ROWS = 64
_MOST_BYTES = 2**28
"""Of keys and values that a graph reads, each row's apart: beyond, what rows share is read once for all of them."""
_LEAST_KEYS = 256
_ASKED = 1
"""Forwards of a shape before a graph of it is captured, which takes as long as two."""
_capturing = threading.Lock()
"""Torch captures one graph at a time."""

Compute = Callable[..., tuple[Tensor, Tensor | None]]
"""What `TransformersForward.forward` takes and gives, its pieces those of blocks."""


class Rows(NamedTuple):
    """What the rows of a small forward read, padded by rows and keys that are nothing."""

    slots: np.ndarray[Any, np.dtype[np.int64]]
    """(rows, keys) slot numbers."""
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """(rows,) how many of them each row sees."""


def cut_rows(runs: Sequence[Run], bytes_a_key: int = 1024) -> Rows | None:
    """What each row of these runs reads; None where that is too much for a graph. `bytes_a_key` are those of a layer's
    keys and values at one position."""
    rows = _padded(sum(run.rows for run in runs), 1)
    keys = _padded(max((len(run.path) for run in runs), default=1), _LEAST_KEYS)
    if rows > _MOST_ROWS or rows * keys * bytes_a_key > _MOST_BYTES:
        return None
    slots, lengths = np.full((rows, keys), SCRATCH), np.ones(rows, dtype=np.int64)
    seen = (run.path[: end + 1] for run in runs for end in range(run.start, len(run.path)))
    for row, path in enumerate(seen):  # padded by keys of its own: others' may be no numbers
        slots[row], lengths[row] = path[-1], len(path)
        slots[row, : len(path)] = path
    return Rows(slots, lengths)


def _padded(count: int, least: int) -> int:
    return max(least, 1 << max(0, count - 1).bit_length())


class GraphedStep:
    """A forward of one shape, whose inputs stay where they are."""

    def __init__(self, shape: tuple[int, ...], window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """For so many rows and keys, and layers without a window and with this one."""
        rows, keys = shape
        self._numbers = torch.empty((4, rows), dtype=torch.int64, device=device)
        """Tokens, positions, what is written to, and which rows are kept."""
        self._lengths = torch.empty(rows, dtype=torch.int64, device=device)
        self._slots = torch.empty(shape, dtype=torch.int64, device=device)
        self._places = torch.arange(keys, device=device)
        self._hidden = torch.tensor([torch.finfo(dtype).min, 0.0], dtype=dtype, device=device)
        self._windows = {None, window}

    def load(self, numbers: Tensor, keep: Tensor, rows: Rows) -> None:
        """Take the inputs: (3, real rows) tokens, positions and slots to write to, and (kept,) rows that are kept."""
        self._numbers.zero_()
        self._numbers[:3, : numbers.shape[1]] = numbers
        self._numbers[3, : len(keep)] = keep
        self._lengths.copy_(torch.from_numpy(rows.lengths))
        self._slots.copy_(torch.from_numpy(rows.slots))

    def pieces(self) -> dict[int | None, tuple[Block, ...]]:
        """What the rows' attention is cut into, by the window of layers."""
        return {window: (self._block(window),) for window in self._windows}

    def compute(self, compute: Compute, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """As `compute` does, for as many rows as there are, the first of which are those kept."""
        tokens, positions, write, keep = self._numbers
        return compute(tokens[None], positions[None], write, keep, self.pieces(), layers)

    def _block(self, window: int | None) -> Block:
        seen = self._places < self._lengths[:, None]
        if window is not None:
            seen &= self._places >= self._lengths[:, None] - window
        bias = self._hidden[seen.long()]
        return Block(len(bias), None, self._slots.view(-1), bias[:, None, None])


class Captured(NamedTuple):
    step: GraphedStep
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """Where the graph leaves them."""


class Graphs:
    """The graphs of one model and its stores of keys and values."""

    def __init__(
        self, compute: Compute, window: int | None, dtype: torch.dtype, device: torch.device, bytes_a_key: int
    ) -> None:
        self._compute = compute
        self._bytes_a_key = bytes_a_key
        self._make = partial(GraphedStep, window=window, dtype=dtype, device=device)
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._pool = torch.cuda.graph_pool_handle()
        """What graphs allocate of: they share it, as they run one after another."""

    def cut(self, runs: Sequence[Run]) -> Rows | None:
        """What a graph is to read; None where there is none for such runs, or not yet."""
        if (
            ALL_ATTENTION_FUNCTIONS[ATTENTION] is not packed_attention
            or (rows := cut_rows(runs, self._bytes_a_key)) is None
        ):
            return None  # parts of a graph can't be timed
        self._asked[rows.slots.shape] += 1
        return rows if self._asked[rows.slots.shape] > _ASKED else None

    def forward(
        self, numbers: Tensor, keep: Tensor, rows: Rows, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """What `compute` gives for the rows kept, of what `Step.load` takes; states without a graph."""
        shape, count = rows.slots.shape, len(keep)
        if layers or shape not in self._captured:
            step = self._make(shape)
            step.load(numbers, keep, rows)
            logits, states = step.compute(self._compute, layers)
            if not layers:
                self._captured[shape] = self._capture(step)
            return logits[:count], None if states is None else states[:count]
        captured = self._captured[shape]
        captured.step.load(numbers, keep, rows)
        captured.graph.replay()
        return captured.logits[:count].clone(), None

    def _capture(self, step: GraphedStep) -> Captured:
        """What was computed once: libraries have made what they keep."""
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):  # others go on
            logits, _ = step.compute(self._compute)
        return Captured(step, graph, logits)
