"""Small forward passes on a GPU as CUDA graphs: launching a model's thousand kernels takes longer than running them.

Each row attends to its whole path separately. Rows and keys are padded to powers of two, so that few graphs are
captured.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tot.decoders.errors import reason
from tot.decoders.kernels.attention import ATTENTION, Block, packed_attention
from tot.decoders.kernels.copies import to_device
from tot.decoders.kernels.native.shared_prefixes import Run
from tot.decoders.models.kv_store import SCRATCH

log = logging.getLogger(__name__)
_MAX_ROWS = 64
_MAX_BYTES = 2**28
"""Maximum bytes of keys and values that a graph reads, all rows together. Above, blocks read shared prefixes once."""
_POOL_BYTES = 2**30
"""Bytes of all graphs of a model above which they are dropped before the next one is captured."""
_MIN_KEYS = 256
_WARMUP_FORWARDS = 1
"""Forward passes of a shape before its graph is captured. Capturing takes as long as two forward passes."""
_capturing = threading.Lock()
"""Torch captures one graph at a time."""

_Numbers = np.ndarray[Any, np.dtype[np.int64]]
Compute = Callable[..., tuple[Tensor, Tensor | None]]
"""A function with the signature of `TransformersForward._compute`, whose pieces are blocks."""


class Rows(NamedTuple):
    """The slots that the rows of a small forward pass attend to, padded with unused rows and keys."""

    slots: _Numbers
    """(rows, keys): slot numbers."""
    lengths: _Numbers
    """(rows,): the number of visible slots."""


def cut_rows(runs: Sequence[Run], bytes_a_key: int = 1024) -> Rows | None:
    """Return the slots of each row of these runs, or None if they are too large for a graph.

    `bytes_a_key` are the bytes of one position's key and value in one layer."""
    rows = _padded(sum(run.rows for run in runs), 1)
    keys = _padded(max((len(run.path) for run in runs), default=1), _MIN_KEYS)
    if rows > _MAX_ROWS or rows * keys * bytes_a_key > _MAX_BYTES:
        return None
    slots, lengths = np.full((rows, keys), SCRATCH), np.ones(rows, dtype=np.int64)
    paths = (run.path[: end + 1] for run in runs for end in range(run.start, len(run.path)))
    for row, path in enumerate(paths):  # pad with a key of the same row: unused slots may hold NaN
        slots[row], lengths[row] = path[-1], len(path)
        slots[row, : len(path)] = path
    return Rows(slots, lengths)


def _padded(count: int, minimum: int) -> int:
    return max(minimum, 1 << max(0, count - 1).bit_length())


class GraphedStep:
    """A forward pass of one shape, with inputs at fixed addresses."""

    def __init__(self, shape: tuple[int, ...], window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate inputs for `shape` (rows, keys), and for layers without a window and with this one."""
        rows, keys = shape
        self._inputs = torch.zeros(5 * rows + rows * keys, dtype=torch.int64, device=device)
        self._numbers = self._inputs[: 5 * rows].view(5, rows)
        """Tokens, positions, slots to write to, the rows to keep, and the numbers of visible slots."""
        self._slots = self._inputs[5 * rows :]
        self._key_indices = torch.arange(keys, device=device)
        self._biases = torch.tensor([torch.finfo(dtype).min, 0.0], dtype=dtype, device=device)
        self._windows = {None, window}

    def load(self, numbers: _Numbers, keep: _Numbers, rows: Rows) -> None:
        """Copy the inputs to the device, all at once.

        `numbers` (3, rows) are tokens, positions and slots to write to; `keep` (kept,) are rows."""
        padded = np.zeros(self._numbers.shape, dtype=np.int64)
        padded[:3, : numbers.shape[1]] = numbers
        padded[3, : len(keep)] = keep
        padded[4] = rows.lengths
        inputs = np.concatenate([padded.reshape(-1), rows.slots.reshape(-1)])
        self._inputs.copy_(to_device(inputs, torch.int64, self._inputs.device))

    def pieces(self) -> dict[int | None, tuple[Block, ...]]:
        """Return the blocks of the rows' attention, by the sliding window of a layer."""
        return {window: (self._block(window),) for window in self._windows}

    def compute(self, compute: Compute, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Call `compute` on the inputs, with all padded rows. The first rows of its results are the kept rows."""
        tokens, positions, write, keep, _ = self._numbers
        return compute(tokens[None], positions[None], write, keep, self.pieces(), layers)

    def _block(self, window: int | None) -> Block:
        lengths = self._numbers[4, :, None]
        visible = self._key_indices < lengths
        if window is not None:
            visible &= self._key_indices >= lengths - window
        bias = self._biases[visible.long()]
        return Block(len(bias), None, self._slots, bias[:, None, None])


class Captured(NamedTuple):
    step: GraphedStep
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """The graph's output buffer."""


class Graphs:
    """The CUDA graphs of one model and its key-value store, in at most `_POOL_BYTES` and one graph more."""

    def __init__(
        self, compute: Compute, window: int | None, dtype: torch.dtype, device: torch.device, bytes_a_key: int
    ) -> None:
        self._compute = compute
        self._device = device
        self._bytes_a_key = bytes_a_key
        self._make = partial(GraphedStep, window=window, dtype=dtype, device=device)
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._requests: Counter[tuple[int, ...]] = Counter()
        self._pool: Any = None
        """The memory pool of all graphs, which never run at the same time."""
        self._pool_bytes = 0
        self._failed = False
        """Whether a capture has failed. Forward passes then run without graphs."""

    def cut(self, runs: Sequence[Run]) -> Rows | None:
        """Return the slots that a graph reads for these runs, or None if they cannot use a graph, or not yet."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if (
            self._failed
            or ALL_ATTENTION_FUNCTIONS[ATTENTION] is not packed_attention
            or (rows := cut_rows(runs, self._bytes_a_key)) is None
        ):
            return None  # attention is replaced, such as for profiling, and parts of a graph can't be timed
        self._requests[rows.slots.shape] += 1
        return rows if self._requests[rows.slots.shape] > _WARMUP_FORWARDS else None

    def forward(
        self, numbers: _Numbers, keep: _Numbers, rows: Rows, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits and states of the kept rows from the inputs of `GraphedStep.load`.

        Hidden states are computed without a graph."""
        shape, count = rows.slots.shape, len(keep)
        if layers or shape not in self._captured:
            step = self._make(shape)
            step.load(numbers, keep, rows)
            logits, states = step.compute(self._compute, layers)
            if not layers:
                self._add(shape, step)
            return logits[:count], None if states is None else states[:count]
        captured = self._captured[shape]
        captured.step.load(numbers, keep, rows)
        captured.graph.replay()
        return captured.logits[:count].clone(), None

    def _add(self, shape: tuple[int, ...], step: GraphedStep) -> None:
        """Capture the graph of a shape. Drop all graphs first if they take too much memory."""
        if self._pool_bytes > _POOL_BYTES:
            self._drop()
        try:
            self._captured[shape] = self._capture(step)
        except RuntimeError as error:  # out of memory, or an operation that no graph can hold
            log.warning("a CUDA graph can't be captured, so decoding is slower: %s", reason(error))
            self._failed = True
            self._drop()

    def _drop(self) -> None:
        """Free the graphs. Their pool is freed only as a whole, and not while one of them runs."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._requests.clear()
        self._pool, self._pool_bytes = None, 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _capture(self, step: GraphedStep) -> Captured:
        """Capture a step that ran once, so that libraries have allocated their workspaces."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the GPU during the capture
        with _capturing:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            reserved = torch.cuda.memory_reserved(self._device)
            with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                logits, _ = step.compute(self._compute)
            self._pool_bytes += max(0, torch.cuda.memory_reserved(self._device) - reserved)
        return Captured(step, graph, logits)
