"""RewardModel: evaluate states with a trained reward model, a classification model of transformers.

Outcome reward models score a whole text (sequence classification). Process reward models score the end of every step
(token classification; Lightman et al., 2023). Weights are loaded from safetensors only; no code from a hub is run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache, partial
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import Field

from tot.decoders.errors import ModelError, reason
from tot.decoders.request import Message
from tot.evaluators.base import Evaluator
from tot.llm.context import Context
from tot.running import in_thread
from tot.tree.tree import Node

Steps = tuple[str, tuple[str, ...]]
"""A question, and the thoughts after it."""
_LOADING = Lock()
"""Held while a model is loaded: concurrent searches load it once."""


class RewardModel(Evaluator):
    """Score the question and the thoughts so far with a reward model.

    `kind` "outcome" needs a sequence-classification head. With one label the value is its raw score, with several the
    probability of `label`. "process" needs a token-classification head. The value is the probability of `label` at the
    last token of every thought, combined by `aggregate`. The text is the question and then the thoughts, each followed
    by `separator`. If the model has a chat template, they are a user and an assistant message.
    """

    model: Any
    """A hub id, a folder, or a model object (which needs `tokenizer`)."""
    tokenizer: Any = None
    kind: Literal["outcome", "process"] = "outcome"
    label: Annotated[int, Field(ge=0)] = 1
    """Index of the label that means correct."""
    aggregate: Literal["last", "min", "mean", "product"] = "last"
    separator: Annotated[str, Field(min_length=1)] = "\n"
    batch: Annotated[int, Field(ge=1)] = 16

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        return "reward model", id(self), _text(ctx, node)

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        texts = [_text(ctx, node) for node in nodes]
        return await in_thread(partial(self.scores, texts), "tot-reward-model")

    def scores(self, texts: Sequence[Steps]) -> list[float]:
        """Return the value of each text. Raises ModelError if the model can't be loaded or lacks the label."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        if isinstance(self.model, str):
            with _LOADING:
                model, tokenizer = _load(self.model, self.kind)
        elif self.tokenizer is None:
            raise ModelError("RewardModel got a model object without a tokenizer: give tokenizer=... too")
        else:
            model, tokenizer = self.model, self.tokenizer
        padding = model.config.pad_token_id
        size = self.batch if padding is not None else 1  # heads find the last token by the padding token
        values: list[float] = []
        for start in range(0, len(texts), size):
            rows = [self._encode(tokenizer, *text) for text in texts[start : start + size]]
            # Pad on the right, which keeps positions.
            ids = pad_sequence([torch.tensor(tokens) for tokens, _ in rows], True, padding or 0).to(model.device)
            mask = pad_sequence([torch.ones(len(tokens)).long() for tokens, _ in rows], True).to(model.device)
            with torch.inference_mode():
                logits = model(input_ids=ids, attention_mask=mask).logits.float()
            for row, (_, ends) in enumerate(rows):
                values.append(self._value(logits[row] if self.kind == "outcome" else logits[row, ends]))
        return values

    def _encode(self, tokenizer: Any, question: str, thoughts: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the token ids and the position of the last token of every thought."""
        from tot.decoders.engine.text import TextCodec

        codec = TextCodec(tokenizer)
        if tokenizer.chat_template is None:
            ids = codec.encode_prompt(question + self.separator)
            closing = tokenizer.sep_token_id
        else:
            ids = codec.encode_prompt((Message(role="user", content=question),))
            closing = tokenizer.eos_token_id
        ends = []
        for thought in thoughts:
            ids += codec.encode(thought + self.separator)
            ends.append(len(ids) - 1)
        return ids + ([closing] if closing is not None else []), ends

    def _value(self, logits: Any) -> float:
        """Return the value from the logits of one text: (labels,) or (thoughts, labels)."""
        labels = logits.shape[-1]
        if self.kind == "outcome" and labels == 1:
            return float(logits[0])
        if not self.label < labels or labels == 1:
            raise ModelError(f"label {self.label} is not among the reward model's {labels} labels: give another label")
        right: list[float] = logits.softmax(-1)[..., self.label].reshape(-1).tolist()
        if self.aggregate == "min":
            return min(right)
        if self.aggregate == "mean":
            return math.fsum(right) / len(right)
        return math.prod(right) if self.aggregate == "product" else right[-1]


def _text(ctx: Context, node: Node) -> Steps:
    state = ctx.state(node)
    return state.question, tuple(thought.text for thought in state.thoughts)


@cache
def _load(name: str, kind: str) -> tuple[Any, Any]:
    """Load a reward model in eval mode and its tokenizer, once per process."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

    head = AutoModelForSequenceClassification if kind == "outcome" else AutoModelForTokenClassification
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, report = head.from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"reward model {name} can't be loaded ({reason(error)}): give a hub id or a folder") from error
    architectures = model.config.architectures or [type(model).__name__]
    if report["missing_keys"] or report["unexpected_keys"] or type(model).__name__ not in architectures:
        # transformers initialises missing weights randomly, and a head of the other kind may have a matching shape
        raise ModelError(f"reward model {name} is {architectures[0]}, not one of kind {kind!r}: try the other kind")
    return model.eval().requires_grad_(False), tokenizer
