"""StateDrafter: drafts from the target's hidden states, with a small recurrent network.

The states that the last token was drawn from are known after each step. A step of the network takes its vector and a
token, and predicts the token after it, among the most frequent ones. It feeds on its own vectors, in training as well
(EAGLE-3, Li et al., 2025, section 3), and has no attention (ReDrafter, Cheng et al., 2024), so it needs no cache: what
can be copied from the context is left to prompt lookup.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tot.decoders.drafting.drafters import DraftContext, Verified
from tot.decoders.drafting.latency_model import LatencyModel
from tot.decoders.drafting.levels import LevelDrafter, Tip
from tot.decoders.errors import ModelError
from tot.decoders.kernels.native.product import product

Array = np.ndarray[Any, Any]
FORMAT = "tot.draft"
"""The format named in a draft's config.json."""
EPSILON = 1e-6
_LATENCY_RATE = 0.05
"""Share of a step's time in the mean."""


class DraftNetwork:
    """The network. `decoders/training/distill/train.py` trains the same in torch."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder has no valid draft."""
        try:
            config = json.loads((folder / "config.json").read_text())
            weights = load_file(folder / "model.safetensors")
            self.target = str(config["target"])
            self.layers: tuple[int, ...] = tuple(map(int, config["layers"]))
            self.target_vocabulary = int(config["vocab_size"])
            self.tokens = weights["tokens"]
            """The tokens that it knows, (known,)."""
            self._row_of = np.full(self.target_vocabulary, len(self.tokens))
            self._row_of[self.tokens] = np.arange(len(self.tokens))
            known, width, states = len(self.tokens), len(weights["norm.weight"]), weights["project.weight"].shape[1]
            if (remainder := states % len(self.layers)) or min(known, width, states) < 1:
                raise ValueError(f"{states} numbers for {len(self.layers)} layers leave {remainder}")
            shapes = {
                "embedding": (known + 1, width), "head": (known, width), "project": (width, states),
                "mix": (4 * width, 2 * width), "out": (width, 2 * width), "norm": (width,), "last_norm": (width,),
            }  # fmt: skip
            found = {name: weights[f"{name}.weight"].astype(np.float32) for name in shapes}
            if wrong := [name for name, shape in shapes.items() if found[name].shape != shape]:
                raise ValueError(f"{wrong[0]} has the shape {found[wrong[0]].shape}")
        except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError, SafetensorError) as error:
            raise ModelError(f"{folder} has no valid draft: {error}; train it again with tot train-draft") from error
        self.hidden = states // len(self.layers)
        self._embedding, self._norm, self._last_norm = (found[name] for name in ("embedding", "norm", "last_norm"))
        self._project, self._mix, self._out, self._head = (
            product(found[name]) for name in ("project", "mix", "out", "head")
        )

    def start(self, states: Array) -> Array:
        """Return the vectors (texts, width) of states (texts, layers, hidden)."""
        return self._project(_normed(states.astype(np.float32)).reshape(len(states), -1))

    def step(self, vectors: Array, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Return the vectors after a token each, and the logits (texts, target's vocabulary), -inf if unknown."""
        both = np.concatenate([_normed(vectors) * self._norm, self._embedding[self._row_of[list(tokens)]]], axis=1)
        gate, up = np.split(self._mix(both), 2, axis=1)
        vectors = vectors + self._out(gate / (1 + np.exp(-gate)) * up)
        logits = np.full((len(vectors), self.target_vocabulary), -np.inf, np.float32)
        logits[:, self.tokens] = self._head(_normed(vectors) * self._last_norm)
        return vectors, logits


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def is_trained(folder: Path) -> bool:
    """Return whether a folder holds a draft for `StateDrafter`."""
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def _normed(vectors: Array) -> Array:
    return np.asarray(vectors / np.sqrt((vectors * vectors).mean(-1, keepdims=True) + EPSILON))


@dataclass(slots=True)
class _Place:
    """A token after a vector; after a step, `vector` is the one after the token."""

    vector: Array
    token: int


class _End(NamedTuple):
    """The end of a text."""

    length: int
    """Number of tokens of the text."""
    states: Array


class StateDrafter(LevelDrafter[_Place]):
    """Drafts with a `DraftNetwork` for all texts whose last states are known."""

    def __init__(self, network: DraftNetwork) -> None:
        super().__init__(network.target_vocabulary)
        self.layers = network.layers
        self._network = network
        self._ends: dict[int, _End] = {}
        vectors = network.start(np.zeros((1, len(network.layers), network.hidden)))
        self._seconds = min(_timed(lambda: network.step(vectors, [0])) for _ in range(3))
        """Mean seconds of a step."""

    def latency(self, context: float) -> LatencyModel:
        return LatencyModel((1,), (self._seconds,))

    def observe(self, verified: Verified) -> None:
        """Remember the states at the end of a text."""
        context = verified.context
        if verified.states is not None:
            self._ends[context.key] = _End(len(context.tokens) + len(verified.tokens), verified.states)

    def _follow(self, contexts: Sequence[DraftContext]) -> list[tuple[int, _Place]]:
        ends = [(i, self._ends.get(context.key)) for i, context in enumerate(contexts) if context.widths]
        known = [(i, end) for i, end in ends if end is not None and end.length == len(contexts[i].tokens)]
        if not known:
            return []
        vectors = self._network.start(np.stack([end.states for _, end in known]))
        return [(i, _Place(vector, contexts[i].tokens[-1])) for (i, _), vector in zip(known, vectors, strict=True)]

    def _logits(self, contexts: Sequence[DraftContext], frontier: Sequence[Tip[_Place]], depth: int) -> Any:
        began = time.perf_counter()
        places = [tip.place for tip in frontier]
        vectors, logits = self._network.step(np.stack([place.vector for place in places]), [p.token for p in places])
        for place, vector in zip(places, vectors, strict=True):
            place.vector = vector
        self._seconds += _LATENCY_RATE * (time.perf_counter() - began - self._seconds)
        return logits

    def _child(self, place: _Place, token: int) -> _Place:
        return _Place(place.vector, token)

    def _forget(self, key: int) -> None:
        self._ends.pop(key, None)
