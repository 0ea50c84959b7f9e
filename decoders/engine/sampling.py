"""Seeded sampling: a token is a pure function of its logits and of (seed, sample, position), never of the batch.

Gumbel-max: the token drawn is argmax(filtered logits / T + G). G is hashed from (seed, sample, position, token id) to
a 24-bit uniform, so it is bounded, and only tokens close enough to the best can win: noise is made for those alone.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 24
GUMBEL_MAX = -math.log(-math.log1p(-(0.5 / 2**_BITS)))
"""No noise is larger: about 17.3."""
_WORD = 0xFFFFFFFF


class Draw(NamedTuple):
    """How to draw the token at one position of one sample."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample: int
    position: int


Read = Draw | int
"""What is wanted of one row of logits: a token drawn, or the log-probability of the token given."""


class Sampled(NamedTuple):
    """A token and the model's log-probability of it (nats; before temperature and filters)."""

    token: int
    logprob: float


def noise_key(draw: Draw) -> int:
    """64 bits that stand for (seed, sample, position)."""
    text = struct.pack("<QQQ", draw.seed, draw.sample, draw.position)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _mix(words: Tensor) -> Tensor:
    """Murmur3's finaliser: a bijection of 32-bit words, kept in int64 (products wrap; the low words are right)."""
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _WORD
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise in float64 for (key, token id) pairs; `keys` are int64 from `noise_key`, shapes broadcast."""
    words = _mix((tokens & _WORD) ^ (keys & _WORD))
    words = _mix((words + ((keys >> 32) & _WORD)) & _WORD)
    uniform = ((words >> (32 - _BITS)).double() + 0.5) / 2**_BITS
    return -torch.log(-torch.log(uniform))


def read(logits: Tensor, reads: Sequence[Read]) -> list[Sampled]:
    """Serve one read a row. `logits` is (rows, vocab) in float32; a row that is not finite gives NaN log-probabilities.

    Ties at temperature 0 go to the token with the lowest id.
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    tokens = torch.empty(len(reads), dtype=torch.int64)
    drawn = [i for i, wanted in enumerate(reads) if isinstance(wanted, Draw) and wanted.temperature > 0]
    greedy = [i for i, wanted in enumerate(reads) if isinstance(wanted, Draw) and wanted.temperature == 0]
    given = [i for i, wanted in enumerate(reads) if not isinstance(wanted, Draw)]
    if given:
        tokens[given] = torch.tensor([reads[i] for i in given])
    if greedy:
        tokens[greedy] = (logits if len(greedy) == len(reads) else logits[greedy]).argmax(dim=-1).cpu()
    if drawn:
        draws = [wanted for wanted in reads if isinstance(wanted, Draw) and wanted.temperature > 0]
        tokens[drawn] = _gumbel_max(logits if len(drawn) == len(reads) else logits[drawn], draws).cpu()
    logprobs = logits.gather(1, tokens.to(logits.device)[:, None])[:, 0] - normaliser
    logprobs = torch.where(torch.isfinite(normaliser), logprobs, torch.nan)
    return [Sampled(token, logprob) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def _gumbel_max(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """(rows, vocab) -> (rows,) tokens drawn."""
    device = logits.device
    temperature = torch.tensor([draw.temperature for draw in draws], device=device)
    scaled = logits / temperature[:, None].to(logits.dtype)
    scaled = filtered(scaled, draws)
    keys = torch.tensor([noise_key(draw) for draw in draws], device=device)
    top, top_token = scaled.max(dim=-1)
    reached = top.double() + gumbel(keys, top_token)  # some token gets at least this
    can_win = scaled >= (reached - GUMBEL_MAX - 1e-3)[:, None].float()  # float32 rounds; 1e-3 is far above that
    rows, candidates = torch.nonzero(can_win, as_tuple=True)
    scores = scaled[rows, candidates].double() + gumbel(keys[rows], candidates)
    best = torch.full_like(reached, -torch.inf).scatter_reduce(0, rows, scores, "amax")
    wins = scores == best[rows]
    none = logits.shape[1]
    winner = torch.full_like(top_token, none).scatter_reduce(0, rows[wins], candidates[wins], "amin")
    return torch.where(winner < none, winner, top_token)  # in a row of NaN nothing wins; its log-probability says so


def filtered(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`scaled` (rows, vocab) with the tokens that top-k, top-p and min-p leave out at -inf."""
    rows = [i for i, draw in enumerate(draws) if draw.top_k or draw.top_p < 1 or draw.min_p]
    if not rows:
        return scaled
    scaled = scaled.clone()
    for i in rows:
        draw = draws[i]
        row = scaled[i]
        if 0 < draw.top_k < len(row):
            row[row < row.topk(draw.top_k).values[-1]] = -torch.inf
        if draw.top_p < 1:
            values, order = row.sort(descending=True, stable=True)
            before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
            row[order[before >= draw.top_p]] = -torch.inf  # the first token has nothing before it, so it stays
        if draw.min_p:
            row[row < row.max() + math.log(draw.min_p)] = -torch.inf  # p < min_p * p_max, in logs
    return scaled
