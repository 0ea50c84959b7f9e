"""Choose the iterations after which FastCoT may cut rationales (FastCoT: Zhang et al., 2023, section 4.4).

Rationales are decoded once; the answers that each cap would give are scored or decoded after parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from benchmarks.rationales import Question
from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.request import Completion, Request
from tot.evaluation.estimate import estimate, paired

LOSS, AGREEMENT = 0.03, 0.9
"""Accuracy that a cap may lose, and the share of answers that must stay unchanged."""


@dataclass
class Answers:
    """Answers in canonical form after a part of each rationale, and after the whole rationale."""

    given: list[str | None]
    whole: list[str | None]
    scores: list[float]
    """Scores of `given`."""
    full: list[float]
    """Scores of `whole`."""

    @classmethod
    def of(cls, questions: Sequence[Question], given: Sequence[Any], whole: Sequence[Any]) -> Answers:
        """Read and score the answers to these questions."""
        rows = [
            (one.read(part), one.read(full), one.score(part), one.score(full))
            for one, part, full in zip(questions, given, whole, strict=True)
        ]
        return cls(*map(list, zip(*rows, strict=True))) if rows else cls([], [], [], [])

    @classmethod
    def joined(cls, several: Sequence[Answers]) -> Answers:
        """Concatenate several batches of answers."""
        return cls(*([value for one in several for value in getattr(one, field.name)] for field in fields(cls)))

    @property
    def unchanged(self) -> list[float]:
        """1 for each answer that equals the answer after the whole rationale, otherwise 0."""
        return [float(answer == full) for answer, full in zip(self.given, self.whole, strict=True)]

    @property
    def accuracy(self) -> float:
        return fmean(self.scores)

    @property
    def agreement(self) -> float:
        return fmean(self.unchanged)


def decode_whole(engine: Engine, questions: Sequence[Question], window: int) -> list[Completion]:
    """Decode every rationale to its end, and record the tokens after each iteration."""
    with load_decoder("fastcot", engine=engine, window=window, trajectory=True) as decoder:
        return decoder.generate([question.request for question in questions])


def by_iteration(
    engine: Engine,
    questions: Sequence[Question],
    decoded: Sequence[Completion],
    iterations: Sequence[int],
    glimpse: bool = True,
) -> list[Answers]:
    """Return the answers that a cap at each iteration would give for rationales that were decoded whole.

    `glimpse` includes the approximate tokens in the truncated rationale.
    """

    def cut(completion: Completion, cap: int) -> list[int] | None:
        if cap > len(completion.trajectory):  # the rationale ended before the cap
            return None
        exact, approximate = completion.trajectory[cap - 1] if cap else (0, ())
        return [*completion.tokens[:exact], *(approximate if glimpse else ())]

    pieces = [[cut(completion, cap) for completion in decoded] for cap in iterations]
    whole = [question.answer(completion) for question, completion in zip(questions, decoded, strict=True)]
    requests = []
    for question, piece in (pair for row in pieces for pair in zip(questions, row, strict=True)):
        if piece is not None:
            request = question.request
            prompt = engine.codec.encode_prompt(request.prompt)
            ids = (*prompt, *piece, *engine.codec.encode(request.answer_trigger or ""))
            sampling = request.sampling.model_copy(update={"max_tokens": request.answer_tokens})
            requests.append(Request(prompt=ids, sampling=sampling, choices=request.choices, purpose=request.purpose))
    with load_decoder("ar", engine=engine) as decoder:
        completions = iter(decoder.generate(requests))
    results = []
    for row in pieces:
        answers = zip(questions, whole, row, strict=True)
        given = [full if piece is None else question.answer(next(completions)) for question, full, piece in answers]
        results.append(Answers.of(questions, given, whole))
    return results


def find_cap(
    iterations: Sequence[int], answers: Sequence[Answers], loss: float, agreement: float | None = None
) -> int | None:
    """Return the cap of a stop rule, or None.

    The paper's rule (section 4.4) is the smallest cap with an accuracy at most `loss` below that with whole rationales.
    With `agreement`, our rule also asks for at least this share of unchanged answers, and that all larger caps stay
    within both limits.
    """
    least, found = fmean(answers[0].full) - loss, None
    for iteration, truncated in sorted(zip(iterations, answers, strict=True), key=lambda pair: -pair[0]):
        if truncated.accuracy >= least and truncated.agreement >= (agreement or 0.0):
            found = iteration
        elif agreement is not None:
            break
    return found


def against_whole(answers: Answers) -> tuple[str, float]:
    """Describe accuracy and agreement against whole rationales; also return the difference's lower bound."""
    change = paired([score - full for score, full in zip(answers.scores, answers.full, strict=True)])
    texts = [estimate(values).format(".0%") for values in (answers.scores, answers.full, answers.unchanged)]
    difference = f"{100 * change.low:.0f} to {100 * change.high:.0f} points"
    note = f"accuracy {texts[0]}, with whole rationales {texts[1]}, difference {difference}"
    return f"{note}; {texts[2]} of the answers unchanged", change.low


def described_cap(
    iterations: Sequence[int], answers: Sequence[Answers], loss: float, agreement: float | None = None
) -> tuple[int | None, str]:
    """Return the cap of a stop rule, as `find_cap` does, and a description."""
    cap = find_cap(iterations, answers, loss, agreement)
    if cap is None:
        kept = "" if agreement is None else f" and {100 * agreement:g}% of the answers"
        return None, f"no cap keeps accuracy within {100 * loss:g} points{kept}"
    note, low = against_whole(answers[iterations.index(cap)])
    if low < -loss:
        count = len(answers[0].given)
        note += f"; {count} questions are too few to guarantee a loss of at most {100 * loss:g} points"
    return cap, f"cap {cap}: {note}"
