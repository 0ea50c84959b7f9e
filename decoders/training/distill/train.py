"""Train a draft on the target's hidden states and distributions.

A draft reads the states that a token was drawn from and the token, and predicts the tokens after it, one step after
another, from its own vectors (EAGLE-3, Li et al., 2025, section 3). The loss is the cross-entropy with the target's
probabilities (DistillSpec, Zhou et al., 2024, forward KL), over its most likely tokens. The acceptance rate of drafts
is the overlap of the two distributions. Randomness depends only on the seed and the step, so training can be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax, silu

from tot.decoders.drafting.state_drafter import EPSILON, FORMAT
from tot.decoders.files import replacing, write_json
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import EMBEDDING, HEAD
from tot.decoders.training.distill.record import Record
from tot.decoders.training.options import DraftOptions
from tot.decoders.training.resuming import load_checkpoint, save_checkpoint, set_learning_rate

_CHECKPOINT_EVERY = 200
_DECAY = 0.8
"""Weight of a step's loss, relative to the step before."""
_MEASURED = 4096
"""Number of positions at which `agreement` is measured."""


class DraftModule(nn.Module):
    """The network of `DraftNetwork`, with the tokens that it knows."""

    def __init__(self, tokens: Sequence[int], states: int, width: int) -> None:
        """`states`: numbers in the states of a token, of all layers."""
        super().__init__()
        self.tokens: Tensor
        self.register_buffer("tokens", torch.tensor(tokens, dtype=torch.int32))
        self.project = nn.Linear(states, width, bias=False)
        self.embedding = nn.Embedding(len(tokens) + 1, width)
        self.norm, self.last_norm = (nn.RMSNorm(width, eps=EPSILON) for _ in range(2))
        self.mix = nn.Linear(2 * width, 4 * width, bias=False)
        self.out = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, len(tokens), bias=False)

    def start(self, states: Tensor) -> Tensor:
        """Return the vectors of states (batch, layers, hidden)."""
        states = states.float()
        scaled = states / (states.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
        vectors: Tensor = self.project(scaled.flatten(1))
        return vectors

    def forward(self, vectors: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors after a token each (given by its row in `tokens`), and the logprobs of the next one."""
        gate, up = self.mix(torch.cat([self.norm(vectors.float()), self.embedding(rows)], -1)).chunk(2, -1)
        vectors = vectors + self.out(silu(gate) * up)
        return vectors, log_softmax(self.head(self.last_norm(vectors.float())).float(), -1)


def new_draft(target: LoadedModel, records: Sequence[Record], options: DraftOptions) -> DraftModule:
    """Create a draft for the most frequent tokens of the records, whose last layer is the target's last.

    Its embeddings and its head begin as the target's head, projected onto its principal directions, and its vectors as
    the last states, projected likewise: few texts cannot teach which tokens are similar.
    """
    torch.manual_seed(options.seed)
    likely = torch.cat([torch.cat([record.tokens[:, None], record.top[:, :4]], 1).flatten() for record in records])
    counts = torch.bincount(likely.long(), minlength=int(target.config.vocab_size))
    tokens = counts.argsort(descending=True, stable=True)[: min(options.known, int((counts > 0).sum()))]
    draft = DraftModule(tokens.tolist(), records[0].states[0].numel(), options.width)
    weight = target.weights[EMBEDDING if target.config.tie_word_embeddings else HEAD]
    table = torch.from_numpy(np.array(weight if isinstance(weight, np.ndarray) else weight.floats(), np.float32))
    table = table[tokens]
    directions = torch.linalg.eigh(table.T @ table)[1][:, -options.width :].flip(1)
    projected, size = table @ directions, directions.shape[1]
    last = torch.cat([record.states[::8, -1] for record in records[:256]]).float()
    lengths = (last @ directions).pow(2).mean(-1).sqrt()
    with torch.no_grad():
        draft.embedding.weight.zero_()[:-1, :size] = projected / projected.std()
        draft.head.weight.zero_()[:, :size] = projected
        draft.last_norm.weight.fill_(float(lengths.mean()))  # as large as the projected states
        draft.project.weight.zero_()[:size, -len(directions) :] = directions.T
        draft.out.weight.mul_(0.1)
    return draft


def save_draft(draft: DraftModule, layers: Sequence[int], target: LoadedModel, folder: Path) -> None:
    """Write a draft that reads the states of `layers` to a folder. Its config comes last."""
    with replacing(folder / "model.safetensors") as file:
        save_file(draft.state_dict(), file.name)
    about = {"format": FORMAT, "target": target.name, "layers": layers, "vocab_size": int(target.config.vocab_size)}
    write_json(folder / "config.json", about)


class _Positions:
    """All positions from which `steps` tokens can be predicted, as batches."""

    def __init__(self, draft: DraftModule, records: Sequence[Record], steps: int) -> None:
        self._records, self._steps = records, steps
        unknown = len(draft.tokens)
        highest = max(max(int(record.tokens.max()), int(record.top.max())) for record in records)
        rows = torch.full((1 + max(highest, int(draft.tokens.max())),), unknown)
        rows[draft.tokens.long()] = torch.arange(unknown)
        self._rows = [(rows[record.tokens.long()], rows[record.top.long()]) for record in records]
        self._unknown = unknown
        self._places = [(i, at) for i, record in enumerate(records) for at in range(len(record.tokens) - steps)]

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return states, rows of the tokens (batch, steps), and rows and probabilities of the top tokens after each."""
        places, steps = [self._places[number] for number in numbers], self._steps
        states = torch.stack([self._records[i].states[at] for i, at in places])
        rows = torch.stack([self._rows[i][0][at : at + steps] for i, at in places])
        top = torch.stack([self._rows[i][1][at + 1 : at + 1 + steps] for i, at in places])
        logprobs = torch.stack([self._records[i].logprobs[at + 1 : at + 1 + steps] for i, at in places])
        known = top < self._unknown
        return states, rows, top.clamp(max=self._unknown - 1), logprobs.float().exp() * known


def train(
    draft: DraftModule,
    records: Sequence[Record],
    options: DraftOptions,
    checkpoint: Path,
    tell: Callable[[int, int, float], None],
) -> None:
    """Train in place, resuming from `checkpoint` if it exists. `tell` is called with (step, steps, loss in nats)."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    positions = _Positions(draft, records, options.steps)
    by_epoch = max(1, math.ceil(len(positions) / options.batch))
    steps = max(1, round(options.epochs * by_epoch))
    first = load_checkpoint(draft, optimizer, checkpoint)
    for step in range(first, steps):
        at = step % by_epoch * options.batch
        if at == 0 or step == first:
            seed = torch.Generator().manual_seed(options.seed + step // by_epoch)
            order = torch.randperm(len(positions), generator=seed)
        set_learning_rate(optimizer, options.learning_rate, step, steps)
        loss = _loss(draft, *positions.batch(order[at : at + options.batch].tolist()))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell(step + 1, steps, loss.item())
        if (step + 1) % _CHECKPOINT_EVERY == 0:
            save_checkpoint(draft, optimizer, step + 1, checkpoint)


def _loss(draft: DraftModule, states: Tensor, rows: Tensor, top: Tensor, p: Tensor) -> Tensor:
    total = torch.zeros(())
    with torch.autocast("cpu", torch.bfloat16):
        vectors = draft.start(states)
        for step in range(rows.shape[1]):
            vectors, logprobs = draft(vectors, rows[:, step])
            total = total - _DECAY**step * (p[:, step] * logprobs.gather(1, top[:, step])).sum(-1).mean()
    return total


@torch.inference_mode()
def agreement(draft: DraftModule, records: Sequence[Record], steps: int) -> list[dict[str, float]]:
    """Measure for each step how well a draft agrees with its target on texts, after the target's own tokens.

    `overlap` is the mean of sum(min(p, q)) at temperature 1 over the target's recorded tokens, the acceptance rate of
    rejection sampling. `greedy` is the fraction of positions at which both have the same most likely token.
    """
    positions = _Positions(draft, records, steps)
    every = max(1, len(positions) // _MEASURED)
    states, rows, top, p = positions.batch(range(0, len(positions), every))
    vectors, result = draft.start(states), []
    for step in range(steps):
        vectors, logprobs = draft(vectors, rows[:, step])
        q = logprobs.gather(1, top[:, step]).exp()
        best = p[:, step].argmax(-1, keepdim=True)
        greedy = (logprobs.argmax(-1) == top[:, step].gather(1, best)[:, 0]) & (p[:, step].sum(-1) > 0)
        result.append(
            {"overlap": float(torch.minimum(q, p[:, step]).sum(-1).mean()), "greedy": float(greedy.float().mean())}
        )
    return result
