"""Distill a small draft model from the recorded distributions of a larger target.

The loss is the cross-entropy with the target's probabilities (DistillSpec, Zhou et al., 2024, forward KL), over its
most likely tokens and the sum of all others. The acceptance rate of drafts is the overlap of the two distributions.
Randomness depends only on the seed and the step, so training can be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import resolve_dtype
from tot.decoders.training.distill.record import Record
from tot.decoders.training.options import HEAD_DIM, DraftOptions
from tot.decoders.training.resuming import load_checkpoint, save_checkpoint, set_learning_rate

_CHECKPOINT_EVERY = 100


def student(target: LoadedModel, options: DraftOptions) -> LlamaForCausalLM:
    """Create a small Llama with the target's vocabulary, in float32, with randomly initialized layers.

    Its embeddings are the target's, projected onto their principal directions. They contain which tokens are similar,
    which few texts cannot teach.
    """
    config = target.model.config
    torch.manual_seed(options.seed)
    small = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // HEAD_DIM,
        num_key_value_heads=options.width // HEAD_DIM,
        max_position_embeddings=options.window,
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(small).float()
    table = target.model.get_input_embeddings().weight.detach().float().cpu()
    _, directions = torch.linalg.eigh(table.T @ table)
    projected = table @ directions[:, -options.width :].flip(1)
    rows = min(len(projected), config.vocab_size)
    with torch.no_grad():
        model.get_input_embeddings().weight[:rows, : projected.shape[1]] = projected[:rows]
    return model


def train(
    model: LlamaForCausalLM,
    records: Sequence[Record],
    options: DraftOptions,
    checkpoint: Path,
    tell: Callable[[int, int, float], None],
) -> None:
    """Train in place, resuming from `checkpoint` if it exists. `tell` is called with (step, steps, loss in nats)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    by_epoch = math.ceil(len(records) / options.batch)
    steps = max(1, round(options.epochs * by_epoch))
    model.train()
    for step in range(load_checkpoint(model, optimizer, checkpoint), steps):
        order = torch.randperm(
            len(records), generator=torch.Generator().manual_seed(options.seed + step // by_epoch)
        ).tolist()
        at = step % by_epoch * options.batch
        set_learning_rate(optimizer, options.learning_rate, step, steps)
        loss = _loss(model, [records[i] for i in order[at : at + options.batch]])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell(step + 1, steps, loss.item())
        if (step + 1) % _CHECKPOINT_EVERY == 0:
            save_checkpoint(model, optimizer, step + 1, checkpoint)
    model.eval()


@torch.inference_mode()
def agreement(model: LlamaForCausalLM, records: Sequence[Record]) -> dict[str, float]:
    """Measure how well a draft agrees with its target on texts.

    `overlap` is the mean of sum(min(p, q)) at temperature 1 over the target's recorded tokens, the acceptance rate of
    rejection sampling. `greedy` is the fraction of positions at which both have the same most likely token.
    """
    overlap = greedy = total = 0.0
    for record in records:
        logprobs, top, target_logprobs = _at_positions(model, [record])
        q = logprobs.gather(1, top)
        overlap += float(torch.minimum(q, target_logprobs).exp().sum())
        greedy += float((logprobs.argmax(-1) == top[:, 0]).sum())
        total += len(top)
    return {"overlap": overlap / total, "greedy": greedy / total}


def _loss(model: LlamaForCausalLM, records: Sequence[Record]) -> Tensor:
    logprobs, top, target_logprobs = _at_positions(model, records)
    q = logprobs.gather(1, top)
    p = target_logprobs.exp()
    others_q = torch.log1p(-q.exp().sum(-1).clamp(max=1 - 1e-6))
    others_p = (1 - p.sum(-1)).clamp(min=0.0)
    return -((p * q).sum(-1) + others_p * others_q).mean()


def _at_positions(model: Any, records: Sequence[Record]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the draft's logprobs (positions, vocab), the target's top tokens and their logprobs (positions, TOP).

    The positions are all recorded positions of the records.
    """
    longest = max(len(record.tokens) for record in records) - 1
    tokens = torch.zeros(len(records), longest, dtype=torch.int64)
    recorded = torch.zeros(len(records), longest, dtype=torch.bool)
    for i, record in enumerate(records):
        length = len(record.tokens) - 1
        tokens[i, :length] = record.tokens[:-1]  # padding is at the end, and attention is causal
        recorded[i, record.first - 1 : length] = True
    with torch.autocast("cpu", torch.bfloat16, enabled=resolve_dtype("auto", "cpu") == "bfloat16"):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[recorded])
    top, target_logprobs = (torch.cat([getattr(record, name) for record in records]) for name in ("top", "logprobs"))
    return log_softmax(logits.float(), -1), top.long(), target_logprobs.float()
