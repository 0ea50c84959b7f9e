"""Head: the probability that a path ends right, read from the hidden states at its end by a small head.

The states come from the forward that drew the text, so a value costs no call. Heads are made by `tot train-value`
(`tot/training/value.py`); a file of one is safetensors, and says which model it reads, asked in which prompts.
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
    """The probability that a path ends right, by the head in a file (`head:path=gsm8k.safetensors`).

    Where the states of a path's end are not at hand, as in a run that is gone on with, one token is drawn after it to
    see them.
    """

    path: str
    """What `tot train-value` wrote."""

    @field_validator("path")
    @classmethod
    def _there(cls, path: str) -> str:
        load_head(path)  # what is wrong with it is said before anything is searched
        return path

    @property
    def layers(self) -> tuple[int, ...]:
        return (load_head(self.path).layer,)

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        thoughts = ctx.state(node).thoughts
        return "head", self.path, tuple((tuple(thought.parts), thought.text) for thought in thoughts)

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        import torch

        head = load_head(self.path)
        head.check(ctx)
        seen = await ctx.each(nodes, lambda node: ctx.ending(node, [head.layer]))
        states = [state[0] for state, _ in seen if state is not None]
        values = iter(head.probabilities(torch.stack(states)).tolist() if states else ())
        valued = [(None if state is None else next(values), reply) for state, reply in seen]
        return [Evaluation(value) if reply is None else reply.evaluation(value) for value, reply in valued]


@dataclass(frozen=True, eq=False)
class ValueHead:
    """What maps a state of a layer to a probability: standardise, weigh, sigmoid."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    """All (hidden,)."""
    bias: Tensor
    """One number, ()."""
    about: dict[str, Any] = field(default_factory=dict)
    """model, identity, prompts, task, layer, and figures of how well it tells."""

    @property
    def layer(self) -> int:
        """Whose states it reads, as `Request.states` numbers them."""
        return int(self.about["layer"])

    def logits(self, states: Tensor) -> Tensor:
        """(n, hidden) states of any type -> (n,), float32."""
        return ((states.float() - self.mean) / self.scale) @ self.weight + self.bias

    def probabilities(self, states: Tensor) -> Tensor:
        return self.logits(states).sigmoid()

    def check(self, ctx: Context) -> None:
        """Raises OptionError where the context asks another model than the head reads, or in other prompts."""
        about = self.about
        if ctx.task.prompts != about["prompts"]:
            raise OptionError(
                f"the head reads {about['model']} asked in {about['prompts']} prompts, and this is {ctx.task.prompts}: "
                f"give --prompts {about['prompts']}, or train a head for these (tot train-value)"
            )
        loaded = ctx.loaded
        if loaded is None:
            raise OptionError(f"the head reads states of {about['model']}, and no model runs here that has some")
        if loaded.identity != about["identity"]:
            raise OptionError(
                f"the head reads {about['model']}, and this is another model: give that one, or train a head for this "
                "one (tot train-value)"
            )

    def save(self, path: Path) -> None:
        """Write it. Raises TaskError where that is impossible."""
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        told = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(self.about, ensure_ascii=False)}
        with writing(path), replacing(path) as unfinished:
            save_file(tensors, unfinished, told)


def load_head(path: str | Path) -> ValueHead:
    """A head from its file, read once while that does not change. Raises OptionError for what is none."""
    place = Path(path)
    try:
        return _read(place, place.stat().st_mtime_ns)
    except OSError as error:
        raise OptionError(f"{path} can't be read: {reason(error)}; make a head by tot train-value") from None


@lru_cache(8)
def _read(path: Path, changed: int) -> ValueHead:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            if (told.get("format"), told.get("version")) != (FORMAT, str(VERSION)):
                found = f"{told.get('format')!r}, version {told.get('version')!r}"
                raise OptionError(
                    f"{path} is {found}, this program reads {FORMAT!r}, {VERSION}: train it again by tot train-value"
                )
            tensors = {name: file.get_tensor(name).float() for name in _TENSORS}
            head = ValueHead(**tensors, about=json.loads(told["about"]))
            missing = {"model", "identity", "prompts", "layer"} - head.about.keys()
            if missing or head.layer < 0:
                raise ValueError(f"{', '.join(sorted(missing)) or 'layer'} missing")
            head.logits(head.mean[None])  # they fit together
            return head
    except (SafetensorError, AttributeError, ValueError, LookupError, RuntimeError, TypeError) as error:
        raise OptionError(f"{path} is no head ({reason(error)}): make one by tot train-value") from None
