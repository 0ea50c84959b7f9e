"""The losses of consistency LLMs (CLLM, section 3.2.2): one forward over a clean text and noisy windows of it.

A window holds a point of a Jacobi trajectory; it stands where its fixed point stands in the clean text, sees the clean
text before that and itself, and is seen by nothing else. The teacher is the student itself on the clean text, without
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax


@dataclass(frozen=True)
class Window:
    """A point of a trajectory, and what it should come to."""

    start: int
    """Where it begins in the response."""
    point: Sequence[int]
    target: Sequence[int]
    """Its fixed point."""


@dataclass(frozen=True)
class Layout:
    """One row for the model: clean text first, then the windows."""

    tokens: Tensor
    """(length,) int64."""
    positions: Tensor
    """(length,) int64."""
    mask: Tensor
    """(length, length) bool: True where the row's token sees the column's."""
    prompt: int
    """Tokens of the prompt."""
    clean: int
    """Tokens of prompt and response."""
    students: Tensor
    """Rows whose predictions are to be those of `teachers`: from a window's first wrong token to its last but one, as
    what comes after the last is no part of it."""
    teachers: Tensor


def layout(prompt: Sequence[int], response: Sequence[int], windows: Sequence[Window]) -> Layout:
    """Lay a text out with its windows."""
    tokens, positions = [*prompt, *response], list(range(len(prompt) + len(response)))
    clean = len(tokens)
    pieces: list[tuple[int, int, int]] = []  # (first row, rows, clean rows seen)
    students: list[int] = []
    teachers: list[int] = []
    for window in windows:
        seen = len(prompt) + window.start
        pieces.append((len(tokens), len(window.point), seen))
        first = len(tokens)
        tokens += window.point
        positions += range(seen, seen + len(window.point))
        wrong = (i for i, pair in enumerate(zip(window.point, window.target, strict=True)) if pair[0] != pair[1])
        places = range(next(wrong, len(window.point)), len(window.point) - 1)  # those of y_<i, i up to n
        students += [first + i for i in places]
        teachers += [seen + i for i in places]
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    mask[:clean, :clean] = torch.ones(clean, clean, dtype=torch.bool).tril()
    for first, rows, seen in pieces:
        mask[first : first + rows, :seen] = True
        mask[first : first + rows, first : first + rows] = torch.ones(rows, rows, dtype=torch.bool).tril()
    return Layout(
        torch.tensor(tokens),
        torch.tensor(positions),
        mask,
        len(prompt),
        clean,
        torch.tensor(students, dtype=torch.int64),
        torch.tensor(teachers, dtype=torch.int64),
    )


def consistency_loss(logits: Tensor, laid_out: Layout) -> Tensor:
    """Equation 4 with forward KL, a mean over places: how far the windows' predictions are from their targets' (nats).

    `logits` is (length, vocab). Without any place after a wrong token it is 0.
    """
    if not len(laid_out.students):
        return logits.sum() * 0.0
    student = log_softmax(logits[laid_out.students].float(), -1)
    teacher = log_softmax(logits[laid_out.teachers].detach().float(), -1)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def ar_loss(logits: Tensor, laid_out: Layout) -> Tensor:
    """Equation 6, a mean over tokens: the response's negative log-likelihood (nats a token)."""
    response = laid_out.tokens[laid_out.prompt : laid_out.clean].to(logits.device)
    return cross_entropy(logits[laid_out.prompt - 1 : laid_out.clean - 1].float(), response)
