"""Losses of consistency LLMs (CLLM, section 3.2.2), from one forward pass over a clean text and noisy windows of it.

A window is a point of a Jacobi trajectory, at the positions of its fixed point in the clean text. It attends to the
clean text before it and to itself, and no other row attends to it. The teacher is the same model on the clean text,
without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax


@dataclass(frozen=True)
class Window:
    """A point of a trajectory and its target."""

    start: int
    """Position of its first token in the response."""
    point: Sequence[int]
    target: Sequence[int]
    """The fixed point of the trajectory."""


@dataclass(frozen=True)
class Layout:
    """One input sequence for the model: the clean text, followed by the windows."""

    tokens: Tensor
    """(length,) int64."""
    positions: Tensor
    """(length,) int64."""
    mask: Tensor
    """(length, length) bool: True where the row's token attends to the column's token."""
    prompt: int
    """Number of tokens in the prompt."""
    clean: int
    """Number of tokens in prompt and response."""
    students: Tensor
    """Rows trained to predict as `teachers`: from the first wrong token of each window to its last but one, as the
    token after the last is outside the window."""
    teachers: Tensor
    """Rows of the clean text at the same positions, one for each of `students`."""

    @property
    def first(self) -> int:
        """The first row whose logits are needed: the last token of the prompt, which predicts the response."""
        return self.prompt - 1


def layout(prompt: Sequence[int], response: Sequence[int], windows: Sequence[Window]) -> Layout:
    """Build the input sequence of a text and its windows."""
    tokens, positions = [*prompt, *response], list(range(len(prompt) + len(response)))
    clean = len(tokens)
    length = clean + sum(len(window.point) for window in windows)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    students: list[int] = []
    teachers: list[int] = []
    for window in windows:
        first, attended = len(tokens), len(prompt) + window.start
        mask[first : first + len(window.point), attended:first] = False
        tokens += window.point
        positions += range(attended, attended + len(window.point))
        wrong = (i for i, pair in enumerate(zip(window.point, window.target, strict=True)) if pair[0] != pair[1])
        offsets = range(next(wrong, len(window.point)), len(window.point) - 1)  # y_<i of eq. 4, for i up to n
        students += [first + i for i in offsets]
        teachers += [attended + i for i in offsets]
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
    """Return the consistency loss (equation 4 with forward KL), in nats, averaged over the student rows.

    The equation sums over them; the authors' code averages, too. `logits` is (length - first, vocab). The loss is 0 if
    there are no student rows.
    """
    if not len(laid_out.students):
        return logits.sum() * 0.0
    student = log_softmax(logits[laid_out.students - laid_out.first].float(), -1)
    teacher = log_softmax(logits[laid_out.teachers - laid_out.first].detach().float(), -1)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def ar_loss(logits: Tensor, laid_out: Layout) -> Tensor:
    """Return the AR loss (equation 6): the response's mean negative log-likelihood (nats per token).

    The equation sums over the tokens; the authors' code averages, too. `logits` is (length - first, vocab).
    """
    response = laid_out.tokens[laid_out.prompt : laid_out.clean].to(logits.device)
    return cross_entropy(logits[: len(response)].float(), response)
