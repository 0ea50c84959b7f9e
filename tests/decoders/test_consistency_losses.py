"""One packed forward over a text and its noisy windows equals separate forwards, and the losses follow CLLM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tot.decoders.training.cllm.losses import Layout, Window, ar_loss, consistency_loss, layout

PROMPT = [11, 12, 13]
RESPONSE = [21, 22, 23, 24, 25, 26, 27]
FIRST = Window(1, [22, 93, 24], [22, 23, 24])
"""Wrong from its second token."""
SECOND = Window(4, [95, 26, 97], [25, 26, 27])
"""Wrong from its first token."""
WHOLE = Window(4, [25, 26, 27], [25, 26, 27])
"""Without wrong tokens."""


def visible(laid_out: Layout, row: int) -> list[int]:
    """Return the tokens that a row attends to, itself included, ordered by position."""
    seen = laid_out.mask[row].nonzero().flatten()
    assert laid_out.positions[seen].tolist() == list(range(len(seen)))
    return [int(token) for token in laid_out.tokens[seen]]


# -- layout ----------------------------------------------------------------------------------------


def test_every_row_attends_as_in_a_separate_forward() -> None:
    """The clean text attends only to itself. A window attends to itself and the clean text before it."""
    clean = [*PROMPT, *RESPONSE]
    laid_out = layout(PROMPT, RESPONSE, [FIRST, SECOND])
    texts = [clean]
    for window in (FIRST, SECOND):
        before = clean[: 3 + window.start]
        texts.append([*before, *window.point])
    expected = [text[: i + 1] for text in texts[:1] for i in range(len(text))]
    expected += [text[: len(text) - 2 + i] for text in texts[1:] for i in range(3)]
    assert [visible(laid_out, row) for row in range(len(laid_out.tokens))] == expected
    assert (laid_out.prompt, laid_out.clean) == (3, 10)
    assert laid_out.mask.dtype == torch.bool
    assert laid_out.mask.shape == (len(expected), len(expected))


def test_a_window_is_trained_from_its_first_wrong_token() -> None:
    """Rows before the first wrong token equal the teacher's, and the last row predicts a token after the window.

    The teacher's row has the same position in the clean text.
    """
    laid_out = layout(PROMPT, RESPONSE, [FIRST, WHOLE, SECOND])
    assert laid_out.students.tolist() == [11, 16, 17]
    assert laid_out.teachers.tolist() == [5, 7, 8]
    assert torch.equal(laid_out.positions[laid_out.students], laid_out.positions[laid_out.teachers])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_one_packed_forward_equals_separate_forwards(
    make_model: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str
) -> None:
    from tot.decoders.training.cllm.train import text_logits

    model = make_model(family)
    laid_out = layout(PROMPT, RESPONSE, [FIRST, SECOND, WHOLE])
    (packed,) = text_logits(model, [laid_out], "cpu")
    assert laid_out.first == len(PROMPT) - 1
    assert packed.shape == (len(laid_out.tokens) - laid_out.first, 300)
    for row in range(laid_out.first, len(laid_out.tokens)):
        alone = logits_alone(model, visible(laid_out, row))[-1]
        assert torch.allclose(packed[row - laid_out.first], alone, atol=1e-4, rtol=1e-4), row
    alone = logits_alone(model, [*PROMPT, *RESPONSE])
    assert torch.allclose(packed[:8], alone[2:], atol=1e-4, rtol=1e-4)
    blind = logits_alone(model, laid_out.tokens.tolist())  # the logits without mask and positions
    assert not torch.allclose(packed[8:], blind[10:], atol=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_texts_do_not_attend_to_each_other(make_model: Callable[..., Any], family: str) -> None:
    from tot.decoders.training.cllm.train import text_logits

    model = make_model(family)
    texts = [
        layout(PROMPT, RESPONSE, [FIRST]),
        layout([5, 6], [7, 8, 9], []),
        layout(PROMPT, RESPONSE, [SECOND, WHOLE]),
    ]
    together = text_logits(model, texts, "cpu")
    alone = [text_logits(model, [text], "cpu")[0] for text in texts]
    for logits, expected in zip(together, alone, strict=True):
        assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


# -- losses ----------------------------------------------------------------------------------------


def made_up(teacher: list[float], student: list[float]) -> tuple[Tensor, Layout]:
    """Return logits over three tokens for a prompt, two more tokens, and a window of two whose first token is wrong."""
    laid_out = layout([0], [1, 0], [Window(0, [2, 0], [1, 0])])
    assert (laid_out.students.tolist(), laid_out.teachers.tolist()) == ([3], [1])
    other = [0.3, 0.2, 0.1]
    logits = torch.tensor([other, teacher, other, student, other]).log()
    return logits + torch.tensor([[0.0], [1.0], [0.5], [-2.0], [3.0]]), laid_out  # logits need not be normalised


def test_the_divergence_equals_a_hand_computation() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    logits, laid_out = made_up(p, q)
    forward = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert consistency_loss(logits, laid_out).item() == pytest.approx(forward)
    p, q = [0.7, 0.2, 0.1], [0.1, 0.3, 0.6]
    logits, laid_out = made_up(p, q)
    forward = 0.7 * math.log(7) + 0.2 * math.log(2 / 3) + 0.1 * math.log(1 / 6)
    assert consistency_loss(logits, laid_out).item() == pytest.approx(forward, rel=1e-5)


def test_the_loss_follows_equation_4() -> None:
    """Sum over i = 1 to n by the context of each prediction. Positions before the first wrong token add nothing."""
    chance = torch.Generator().manual_seed(3)
    says: dict[tuple[int, ...], Tensor] = {}

    def q(text: list[int]) -> Tensor:
        return says.setdefault(tuple(text), torch.randn(5, generator=chance).log_softmax(-1))

    window = Window(1, [22, 93, 24, 95], [22, 23, 24, 96])
    fixed = RESPONSE[1:5]
    x = [*PROMPT, *RESPONSE[:1]]
    terms = []
    for i in range(4):
        teacher, student = q([*x, *fixed[:i]]), q([*x, *window.point[:i]])
        terms.append(float((teacher.exp() * (teacher - student)).sum()))
    assert [term > 0 for term in terms] == [False, False, True, True]
    laid_out = layout(PROMPT, RESPONSE, [window])
    logits = torch.stack([q(visible(laid_out, row)) for row in range(len(laid_out.tokens))])
    assert consistency_loss(logits[2:], laid_out).item() == pytest.approx(sum(terms) / 2, rel=1e-5)


def test_the_ar_loss_is_the_responses_cross_entropy() -> None:
    laid_out = layout([4, 3], [0, 2, 1], [Window(1, [1, 1], [2, 1])])
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    probabilities = logits.detach().softmax(-1).tolist()
    drawn = [(1, 0), (2, 2), (3, 1)]  # the row before each response token gives its probability
    expected = -sum(math.log(probabilities[row][token]) for row, token in drawn) / 3
    loss = ar_loss(logits[laid_out.first :], laid_out)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).nonzero().flatten().tolist() == [1, 2, 3]


def test_gradients_reach_only_the_student() -> None:
    laid_out = layout(PROMPT, RESPONSE, [FIRST, SECOND])
    logits = torch.randn(len(laid_out.tokens), 5, generator=torch.Generator().manual_seed(2), requires_grad=True)
    consistency_loss(logits[laid_out.first :], laid_out).backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).nonzero().flatten().tolist() == laid_out.students.tolist()


@pytest.mark.parametrize(
    "windows", [[], [WHOLE], [WHOLE, Window(0, [21, 22], [21, 22])], [Window(0, [21, 9], [21, 22])]]
)
def test_without_a_wrong_token_the_loss_is_zero(windows: list[Window]) -> None:
    laid_out = layout(PROMPT, RESPONSE, windows)
    logits = torch.randn(len(laid_out.tokens), 5, requires_grad=True)
    loss = consistency_loss(logits[laid_out.first :], laid_out)
    assert loss.item() == 0
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad.any()
