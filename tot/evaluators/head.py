"""Head: a linear probe that predicts from the hidden state at the end of a path whether it leads to a right answer.

The states come from the forward pass that decoded the text, so a value needs no call. `tot train-value` trains heads
(`tot/training/value.py`). A head is a safetensors file that records its model and prompts.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from tot.decoders.errors import OptionError, reason
from tot.decoders.files import replacing, writing
from tot.evaluators.base import Evaluator
from tot.llm.context import Context
from tot.llm.replies import Evaluation
from tot.tree.tree import Node

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "tot.value"
VERSION = 2
_TENSORS = ("mean", "scale", "weight", "bias")


class Head(Evaluator):
    """Predict the probability of a right answer with a head from a file (`head:path=gsm8k.safetensors`).

    If the states at the end of a path are not available, as in a resumed run, one token is decoded to compute them.
    """

    path: str
    """A file from `tot train-value`."""

    @field_validator("path")
    @classmethod
    def _exists(cls, path: str) -> str:
        load_head(path)  # fail before the search starts
        return path

    @property
    def layers(self) -> tuple[int, ...]:
        return (load_head(self.path).layer,)

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        thoughts = ctx.state(node).thoughts
        return "head", self.path, tuple((tuple(thought.parts), thought.text) for thought in thoughts)

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        import numpy as np
        import torch

        head = load_head(self.path)
        head.check(ctx)
        endings = await ctx.each(nodes, lambda node: ctx.ending(node, [head.layer]))
        states = [state[0] for state, _ in endings if state is not None]
        values = iter(head.probabilities(torch.from_numpy(np.stack(states))).tolist() if states else ())
        evaluated = [(None if state is None else next(values), reply) for state, reply in endings]
        return [Evaluation(value) if reply is None else reply.evaluation(value) for value, reply in evaluated]


@dataclass(frozen=True, eq=False)
class ValueHead:
    """A map from the hidden state of a layer to a probability: standardise, linear, sigmoid."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    """`mean`, `scale` and `weight` have the shape (hidden,)."""
    bias: Tensor
    """Shape ()."""
    about: dict[str, Any] = field(default_factory=dict)
    """model, identity, prompts, task, layer, and metrics of its accuracy."""

    @property
    def layer(self) -> int:
        """The layer that it reads, numbered as in `Request.states`."""
        return int(self.about["layer"])

    def logits(self, states: Tensor) -> Tensor:
        """Map states (n, hidden) of any dtype to logits (n,) in float32."""
        return ((states.float() - self.mean) / self.scale) @ self.weight + self.bias

    def probabilities(self, states: Tensor) -> Tensor:
        return self.logits(states).sigmoid()

    def check(self, ctx: Context) -> None:
        """Raise OptionError if the context uses another model or other prompts than the head."""
        about = self.about
        if ctx.task.prompts != about["prompts"]:
            raise OptionError(
                f"the head was trained with {about['prompts']} prompts, but this run uses {ctx.task.prompts} prompts: "
                f"give --prompts {about['prompts']}, or train a head for these (tot train-value)"
            )
        loaded = ctx.loaded
        if loaded is None:
            raise OptionError(f"the head needs hidden states of {about['model']}: run that model locally")
        if loaded.identity != about["identity"]:
            raise OptionError(
                f"the head was trained on {about['model']}, not on this model: use {about['model']}, or train a head "
                "for this model (tot train-value)"
            )

    def save(self, path: Path) -> None:
        """Write the head to a file. Raises TaskError if it can't be written."""
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(self.about, ensure_ascii=False)}
        with writing(path), replacing(path) as file:
            save_file(tensors, file.name, metadata)


def load_head(path: str | Path) -> ValueHead:
    """Load a head from a file, cached until the file changes. Raises OptionError if it is not a head."""
    place = Path(path)
    try:
        return _read(place, place.stat().st_mtime_ns)
    except OSError as error:
        raise OptionError(f"{path} can't be read: {reason(error)}; train a head with tot train-value") from None


@lru_cache(8)
def _read(path: Path, changed: int) -> ValueHead:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, str(VERSION)):
                version = f"{metadata.get('format')!r}, version {metadata.get('version')!r}"
                raise OptionError(
                    f"{path} is {version}, this program reads {FORMAT!r}, {VERSION}: train a new head (tot train-value)"
                )
            tensors = {name: file.get_tensor(name).float() for name in _TENSORS}
            head = ValueHead(**tensors, about=json.loads(metadata["about"]))
            missing = {"model", "identity", "prompts", "layer"} - head.about.keys()
            if missing or head.layer < 0:
                raise ValueError(f"{', '.join(sorted(missing)) or 'layer'} missing")
            head.logits(head.mean[None])  # check that the shapes match
            return head
    except (SafetensorError, AttributeError, ValueError, LookupError, RuntimeError, TypeError) as error:
        raise OptionError(f"{path} is not a head ({reason(error)}): train one with tot train-value") from None
