"""Models of published sizes with random weights, made on the device itself, and a tokenizer as large as they are.

What weights say doesn't matter for time, but for two things. Samples of one prompt have to differ, or the engine would
compute them once: random weights see to that. And a draft has to be right as often as is stated: `on_a_walk`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tot.decoders.models.loading import LoadedModel

_EMBEDDING = 8.0
"""Deviation of embeddings on a walk: what layers add to them is small beside it."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as in its config.json, and those of the draft model beside it."""

    family: str
    sizes: Mapping[str, Any]
    draft: Mapping[str, Any]
    prompt: int = 400
    """Tokens of prompts."""


def _sizes(hidden: int, between: int, layers: int, heads: int, context: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        **more,
    }


_LLAMA_68M = _sizes(768, 3072, 2, 12, 2048)
SHAPES = {
    "llama-2-7b": Shape("llama", _sizes(4096, 11008, 32, 32, 4096, vocab_size=32000, rms_norm_eps=1e-5), _LLAMA_68M),
    "qwen2.5-7b": Shape(
        "qwen2",
        _sizes(3584, 18944, 28, 28, 32768, vocab_size=152064, num_key_value_heads=4, rope_theta=1e6),
        _LLAMA_68M,
    ),
    # Heads so small that no kernel in C takes them: a CPU goes the way that a GPU goes.
    "tiny": Shape("llama", _sizes(128, 64, 2, 8, 512, vocab_size=512), _sizes(128, 64, 1, 8, 512), prompt=24),
}


def build(family: str, sizes: Mapping[str, Any], device: torch.device, seed: int = 0) -> Any:
    """A model in bfloat16 whose weights never were anywhere but on `device`. No token ends a text."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **sizes, **ends)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Every byte a token, and as many made-up words as the vocabulary has room for. Nothing merges."""
    spelled = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    spelled += [f"Ġw{i}" for i in range(vocabulary - len(spelled))]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(spelled)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def loaded(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """As `load_model` would give it."""
    return LoadedModel(model, tokenizer, name, model.dtype, model.device)


def twin(model: Any) -> Any:
    """The same weights in modules of their own, for transformers: an engine changes a model's attention."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


@contextmanager
def on_a_walk(model: Any) -> Iterator[None]:
    """Inside, the model is all but sure that token t + 1 follows t."""
    ours = model.get_input_embeddings().weight, model.lm_head.weight
    before = [weight.clone() for weight in ours]
    lead(model, torch.arange(1, model.config.vocab_size + 1))
    try:
        yield
    finally:
        for weight, kept in zip(ours, before, strict=True):
            weight.copy_(kept)


def lead(model: Any, follows: Tensor) -> None:
    """Have the model say token `follows[t]` (modulo the vocabulary) after t, whatever stands before it.

    What comes out of the layers points most of all to the embedding that went in, so the row of `lm_head` that points
    there wins by far, at T = 1 too.
    """
    embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
    embeddings.normal_(0.0, 1.0)
    head.zero_()
    head.index_add_(0, (follows % len(head)).to(head.device), embeddings)
    embeddings.mul_(_EMBEDDING)


def build_draft(shape: Shape, device: torch.device, acceptance: float) -> Any:
    """A draft for a target on a walk. After a share `acceptance` of all tokens, chosen at random, it says what the
    target says, else the token after that; so that is how often a drafted token is accepted where it is reached."""
    vocabulary = shape.sizes["vocab_size"]
    draft = build("llama", {**shape.draft, "vocab_size": vocabulary}, device, seed=1)
    right = torch.rand(vocabulary, generator=torch.Generator().manual_seed(2)) < acceptance
    lead(draft, torch.arange(vocabulary) + torch.where(right, 1, 2))
    return draft
