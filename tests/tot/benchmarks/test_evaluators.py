"""The evaluators' part of `python -m benchmarks quality`: pieces of messages, AUROCs and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.evaluators import PLACES, Judged, auroc, pieces_of, verdict
from tot.tree.thought import Drawn


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("One.\n\nTwo.\n \n\n Three", ["One.\n\n", "Two.\n \n\n ", "Three"]),
        ("\n\nOne\ntwo", ["\n\nOne\ntwo"]),
        ("One\n\n", ["One\n\n"]),
        ("", []),
    ],
)
def test_a_message_is_split_into_its_paragraphs(text: str, pieces: list[str]) -> None:
    """A token across a paragraph break belongs to the next paragraph."""
    tokens = tuple(map(ord, text))
    whole = Drawn(text=text, tokens=tokens, logprobs=tuple(-float(token) for token in tokens))

    def decode(ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    split = pieces_of(whole, decode)
    assert [(one.text, decode(one.tokens)) for one in split] == [(piece, piece) for piece in pieces]
    assert all(one.logprobs == tuple(-float(token) for token in one.tokens) for one in split)
    assert [(one.text, one.tokens) for one in pieces_of(whole, None)] == [(piece, ()) for piece in pieces]
    twos = pieces_of(whole, lambda tokens: text[: 2 * len(tokens)])
    assert [one.text for one in twos] == pieces
    assert sum(len(one.tokens) for one in twos) <= len(tokens)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(lambda t: t, "1.00 (0.57 to 1.00)"), (lambda t: -t, "0.00 (0.00 to 0.43)"), (lambda t: 3, "0.50 (0.17 to 0.83)")],
)
def test_auroc_of_known_values(value: Any, expected: str) -> None:
    questions = [
        [Judged(depth, depth / 2, truth, value(truth)) for depth in (1, 2) for truth in (0.0, 0.25, 1.0)]
        for _ in range(5)
    ]
    questions.append([Judged(1, 0.1, 1.0, 0.0), Judged(1, 0.1, 1.0, 5.0)])  # equal truths, so nothing to rank
    for place in ("all", "first pieces", "half way", "before the end", "ends"):
        assert auroc(questions, PLACES[place]) == f"{expected}, 5 questions"  # language: ok
    assert auroc(questions[-1:], PLACES["all"]) == ""  # language: ok


@pytest.mark.parametrize(
    ("before", "at_end", "expected"),
    [
        (14, 10, "good enough to prune by (AUROC before the end 0.70 (0.67 to 0.73), at the end 0.50 (0.47 to 0.53))"),
        (12, 11, "good enough to weigh votes, too noisy to prune by (AUROC before the end 0.60 (0.57 to 0.63), "),
        (10, 10, "not shown to be good enough to prune by or to weigh votes (AUROC before the end 0.50"),
        (20, 0, "good enough to prune by (AUROC before the end 1.00 (1.00 to 1.00), at the end 0.00"),
    ],
)
def test_verdicts_follow_from_the_lower_bounds(before: int, at_end: int, expected: str) -> None:
    """A right piece has the value `count` among twenty wrong ones with the values 0.5, 1.5 and so on."""
    pieces = [Judged(1, 0.5, 1.0, before), *(Judged(1, 0.5, 0.0, wrong + 0.5) for wrong in range(20))]
    pieces += [Judged(2, 1.0, 1.0, at_end), *(Judged(2, 1.0, 0.0, wrong + 0.5) for wrong in range(20))]
    assert verdict([pieces] * 1000).startswith(expected)


def test_a_wide_interval_is_no_evidence() -> None:
    """The mean AUROC of these questions is 0.75, but the interval includes 0.5."""
    questions = [[Judged(1, along, 1.0, value), Judged(1, along, 0.0, 0.0)] for along in (0.5, 1.0) for value in (1, 0)]
    found = "(AUROC before the end 0.75 (0.20 to 0.97), at the end 0.75 (0.20 to 0.97))"
    assert verdict(questions) == f"not shown to be good enough to prune by or to weigh votes {found}"


def test_an_evaluator_without_pairs_to_rank_is_not_known() -> None:
    expected = "not shown to be good enough to prune by or to weigh votes (AUROC before the end not known, at the end "
    assert verdict([[Judged(1, 0.5, 1.0, 0.0)]]) == f"{expected}not known)"
