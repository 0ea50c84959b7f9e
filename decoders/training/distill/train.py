"""A small draft model, distilled on what a larger target was recorded to say.

The loss is the cross-entropy with the target's probabilities (DistillSpec, Zhou et al., 2024, forward KL), of its
likeliest tokens and of all others as one: a draft is accepted as far as the two distributions overlap. Resumable: what
is random depends on the seed and the step alone.
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
    """A small Llama over the target's tokens, in float32; its layers are random.

    Its embeddings are the target's, projected onto the directions in which they differ most: with few texts, half of
    what there is to learn is which tokens are alike.
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
    """Train in place, going on from `checkpoint` if it is there. `tell` hears (step, of how many, loss in nats)."""
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
    """How far a draft agrees with its target on texts: `overlap`, the mean of sum(min(p, q)) at temperature 1, is what
    the rejection rule would accept of drafts drawn at each place (counting the target's likeliest tokens only);
    `greedy` is how often the two think the same token the likeliest."""
    overlap = greedy = total = 0.0
    for record in records:
        logprobs, top, said = _at_places(model, [record])
        q = logprobs.gather(1, top)
        overlap += float(torch.minimum(q, said).exp().sum())
        greedy += float((logprobs.argmax(-1) == top[:, 0]).sum())
        total += len(top)
    return {"overlap": overlap / total, "greedy": greedy / total}


def _loss(model: LlamaForCausalLM, records: Sequence[Record]) -> Tensor:
    logprobs, top, said = _at_places(model, records)
    q = logprobs.gather(1, top)
    p = said.exp()
    others_q = torch.log1p(-q.exp().sum(-1).clamp(max=1 - 1e-6))
    others_p = (1 - p.sum(-1)).clamp(min=0.0)
    return -((p * q).sum(-1) + others_p * others_q).mean()


def _at_places(model: Any, records: Sequence[Record]) -> tuple[Tensor, Tensor, Tensor]:
    """At each place that the target spoke about: the draft's log-probabilities (places, vocab), the target's likeliest
    tokens and their log-probabilities (places, TOP)."""
    longest = max(len(record.tokens) for record in records) - 1
    tokens = torch.zeros(len(records), longest, dtype=torch.int64)
    places = torch.zeros(len(records), longest, dtype=torch.bool)
    for i, record in enumerate(records):
        length = len(record.tokens) - 1
        tokens[i, :length] = record.tokens[:-1]  # what is padded comes last, and attention is causal
        places[i, record.first - 1 : length] = True
    with torch.autocast("cpu", torch.bfloat16, enabled=resolve_dtype("auto", tokens.device) == torch.bfloat16):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[places])
    top, said = (torch.cat([getattr(record, name) for record in records]) for name in ("top", "logprobs"))
    return log_softmax(logits.float(), -1), top.long(), said.float()
