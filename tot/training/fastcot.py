"""What cutting rationales costs: answers from parts of them, by iteration and by what is masked (FastCoT, Zhang et al.,
2023, sections 4.4 and 5), and the cap that follows.

Rationales are decoded once; the answer after any part of them is scored, or decoded, from there.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, cast

from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Request, Sampling
from tot.evaluation.data import rows
from tot.evaluation.estimate import bootstrap, estimate
from tot.registry import load_task
from tot.task.checked import CheckedTask
from tot.task.task import Task

ANSWER_TOKENS = 12
BATCH = 16
"""Questions that are answered at once after parts of rationales."""


@dataclass(frozen=True)
class Rationale:
    """A question, asked for a rationale and then, after a trigger, for the answer."""

    task: Task
    request: Request
    reference: Any

    def answer(self, completion: Completion) -> Any | None:
        """The likeliest choice, or what can be read of the text after the trigger."""
        if completion.choice_logprobs:
            scores = [choice.total for choice in completion.choice_logprobs]
            return self.request.choices[scores.index(max(scores))].strip()
        return self.task.parse_answer(f"{self.request.answer_trigger}{completion.answer}")

    def right(self, answer: Any | None) -> float:
        return self.task.score(answer, self.reference)

    def read(self, answer: Any | None) -> str | None:
        """An answer as it is compared with others; None where there is none."""
        return None if answer is None else str(self.task.canonical(answer))


def rationales(task: Task, rows: Iterable[Mapping[str, Any]], max_tokens: int, chat: bool = False) -> list[Rationale]:
    """Each row's question under the task's `chain` template and its trigger, which is that of the papers' prompts also
    where it is asked as a chat; decoded greedily.

    Raises OptionError for a task without a trigger for it.
    """
    trigger = task.triggers.get(task.chain)
    if trigger is None:
        raise OptionError(
            f"task {type(task).__name__} has no answer trigger for its template {task.chain!r}: set `triggers`"
        )
    task = cast(Task, CheckedTask(task.in_chat() if chat else task))
    asked = []
    for row in rows:
        state = task.start(task.question_of(row))
        sampling = {**task.sampling.get(task.chain, {}), "max_tokens": max_tokens, "temperature": 0.0}
        sampling["stop"] = (*sampling.get("stop", ()), trigger)
        request = Request(
            prompt=task.prompt(task.chain, state),
            sampling=Sampling(**sampling),
            purpose="answer",
            answer_trigger=trigger,
            answer_tokens=ANSWER_TOKENS,
            choices=tuple(f" {choice}" for choice in task.choices(state)),
        )
        asked.append(Rationale(task, request, task.reference_of(row)))
    return asked


def questions(task: str, data: str, limit: int, max_tokens: int, seed: int, chat: bool = False) -> list[Rationale]:
    """The rationales of a random choice of rows. Raises OptionError where there are less than two."""
    chosen = list(rows(data))
    random.Random(seed).shuffle(chosen)
    asked = rationales(load_task(task), islice(chosen, limit), max_tokens, chat)
    if len(asked) < 2:
        raise OptionError(f"{data} has {len(asked)} rows: give a file with more")
    return asked


def batches(asked: Sequence[Rationale]) -> list[Sequence[Rationale]]:
    """In parts of `BATCH`."""
    return [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]


@dataclass
class Answers:
    """What was answered after a part of each rationale, beside the answers after all of it."""

    given: list[str | None]
    whole: list[str | None]
    scores: list[float]
    """Of what was given."""
    full: list[float]
    """Of what is answered after whole rationales."""

    @classmethod
    def of(cls, asked: Sequence[Rationale], given: Sequence[Any], whole: Sequence[Any]) -> Answers:
        """To these questions, as they were read."""

        def each(what: Callable[[Rationale, Any], Any], answers: Sequence[Any]) -> list[Any]:
            return [what(one, answer) for one, answer in zip(asked, answers, strict=True)]

        read, right = Rationale.read, Rationale.right
        return cls(each(read, given), each(read, whole), each(right, given), each(right, whole))

    @classmethod
    def joined(cls, several: Sequence[Answers]) -> Answers:
        """Those of all, one after another."""
        return cls(*([value for one in several for value in getattr(one, each.name)] for each in fields(cls)))

    @property
    def unchanged(self) -> list[float]:
        """1 where the answer is that after the whole rationale."""
        return [float(answer == full) for answer, full in zip(self.given, self.whole, strict=True)]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def agreement(self) -> float:
        return statistics.fmean(self.unchanged)

    def against_whole(self) -> tuple[str, float]:
        """Accuracy and answers beside those of whole rationales, in words; and the lower end of the difference."""
        lost = bootstrap([ours - theirs for ours, theirs in zip(self.scores, self.full, strict=True)])
        told = [estimate(values).format(".0%") for values in (self.scores, self.full, self.unchanged)]
        difference = f"{100 * lost.low:.0f} to {100 * lost.high:.0f} points"
        note = f"accuracy {told[0]}, of whole rationales {told[1]}, difference {difference}"
        return f"{note}; {told[2]} of the answers unchanged", lost.low


def decode_whole(engine: Engine, asked: Sequence[Rationale], window: int) -> list[Completion]:
    """Every rationale to its end, with what each iteration left."""
    with load_decoder("fastcot", engine=engine, window=window, trajectory=True) as decoder:
        return decoder.generate([one.request for one in asked])


def by_iteration(
    engine: Engine,
    asked: Sequence[Rationale],
    decoded: Sequence[Completion],
    iterations: Sequence[int],
    glimpse: bool = True,
) -> list[Answers]:
    """The answers that a cap at each of these iterations would give, with or without the approximate tokens, to
    rationales that were decoded whole."""

    def left(completion: Completion, cap: int) -> list[int] | None:
        if cap == 0:
            return []
        if cap > len(completion.trajectory):  # it has ended by itself
            return None
        exact, approximate = completion.trajectory[cap - 1]
        return [*completion.tokens[:exact], *(approximate if glimpse else ())]

    return _after(engine, asked, decoded, [[left(completion, cap) for completion in decoded] for cap in iterations])


def masked(
    engine: Engine, asked: Sequence[Rationale], shares: Sequence[float], seeds: int | None = None
) -> list[Answers]:
    """Section 5.2: the answers after rationales of which each of these shares is masked: from the end, or at random
    places with so many seeds, whose answers are one after another."""
    with load_decoder("ar", engine=engine) as decoder:
        decoded = decoder.generate([one.request for one in asked])
    texts = [engine.codec.encode(completion.parts[0].text) for completion in decoded]
    tokenizer = engine.loaded.tokenizer
    mask = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def left(number: int, share: float, seed: int) -> list[int] | None:
        tokens = list(texts[number])
        hidden = round(share * len(tokens))
        places: Sequence[int] = range(len(tokens) - hidden, len(tokens))
        if seeds is not None:
            places = random.Random(f"{seed}/{asked[number].request.prompt}").sample(range(len(tokens)), hidden)
        for place in places:
            tokens[place] = mask
        return tokens if hidden else None

    results = []
    for share in shares:
        pieces = [[left(number, share, seed) for number in range(len(asked))] for seed in range(seeds or 1)]
        results.append(Answers.joined(_after(engine, asked, decoded, pieces)))
    return results


def _after(
    engine: Engine,
    asked: Sequence[Rationale],
    decoded: Sequence[Completion],
    pieces: Sequence[Sequence[Sequence[int] | None]],
) -> list[Answers]:
    """The answers after each of these rows of pieces, one of each rationale, and the trigger; None stands for the whole
    rationale."""
    whole = [one.answer(completion) for one, completion in zip(asked, decoded, strict=True)]
    requests = []
    for one, piece in (pair for row in pieces for pair in zip(asked, row, strict=True)):
        if piece is not None:
            before = engine.codec.encode_prompt(one.request.prompt)
            ids = (*before, *piece, *engine.codec.encode(one.request.answer_trigger or ""))
            sampling = one.request.sampling.model_copy(update={"max_tokens": ANSWER_TOKENS})
            requests.append(
                Request(prompt=ids, sampling=sampling, choices=one.request.choices, purpose=one.request.purpose)
            )
    with load_decoder("ar", engine=engine) as decoder:
        completions = iter(decoder.generate(requests))
    results = []
    for row in pieces:
        given = [
            full if piece is None else one.answer(next(completions))
            for one, full, piece in zip(asked, whole, row, strict=True)
        ]
        results.append(Answers.of(asked, given, whole))
    return results


@dataclass(frozen=True)
class Calibration:
    """The cap found, and the curve that it was read from."""

    cap: int | None
    """None where no cap keeps what was asked for."""
    iterations: Sequence[int]
    accuracy: Sequence[float]
    agreement: Sequence[float]
    full: float
    """Accuracy after whole rationales."""


def calibrate(iterations: Sequence[int], answers: Sequence[Answers], loss: float, agreement: float) -> Calibration:
    """Section 4.4: the least cap from which on, at all later ones too, accuracy is at most `loss` below that of whole
    rationales and at least a share `agreement` of the answers are those of whole rationales."""
    full = statistics.fmean(answers[0].full)
    cap = None
    for iteration, found in sorted(zip(iterations, answers, strict=True), key=lambda pair: -pair[0]):
        if found.accuracy < full - loss or found.agreement < agreement:
            break
        cap = iteration
    return Calibration(
        cap, iterations, [found.accuracy for found in answers], [found.agreement for found in answers], full
    )


def find_cap(
    iterations: Sequence[int], answers: Sequence[Answers], loss: float, agreement: float
) -> tuple[Calibration, str]:
    """The cap that these answers ask for, and how sure that is, in words."""
    found = calibrate(iterations, answers, loss, agreement)
    if found.cap is None:
        return found, f"no cap keeps accuracy within {100 * loss:g} points and {100 * agreement:g}% of the answers"
    note, low = answers[list(iterations).index(found.cap)].against_whole()
    if low < -loss:
        note += f"; {len(answers[0].given)} questions are too few to be sure of {100 * loss:g} points"
    return found, f"cap {found.cap}: {note}"
