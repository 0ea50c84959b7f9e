"""Measure how truncated or masked rationales change answers, and calibrate the iteration cap of FastCoT.

FastCoT: Zhang et al., 2023, sections 4.4 and 5. Rationales are decoded once; answers after parts of them are scored or
decoded from there.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Request, Sampling
from tot.evaluation.data import rows
from tot.evaluation.estimate import estimate, paired
from tot.registry import load_task
from tot.task.checked import CheckedTask
from tot.task.task import Task

ANSWER_TOKENS = 12
BATCH = 16
"""Number of questions per batch."""


@dataclass(frozen=True)
class Rationale:
    """A request for a rationale followed by an answer trigger and the answer."""

    task: CheckedTask
    request: Request
    reference: Any

    def answer(self, completion: Completion) -> Any | None:
        """Return the most likely choice, otherwise the answer parsed from the text after the trigger."""
        if completion.choice_logprobs:
            scores = [choice.total for choice in completion.choice_logprobs]
            return self.request.choices[scores.index(max(scores))].strip()
        return self.task.parse_answer(f"{self.request.answer_trigger}{completion.answer}")

    def right(self, answer: Any | None) -> float:
        return self.task.score(answer, self.reference)

    def read(self, answer: Any | None) -> str | None:
        """Return an answer in canonical form for comparisons; None if it is missing."""
        return None if answer is None else str(self.task.canonical(answer))


def rationales(task: Task, rows: Iterable[Mapping[str, Any]], max_tokens: int, chat: bool = False) -> list[Rationale]:
    """Return greedy requests for the rationale of each row, with the task's `chain` template.

    Raises OptionError for a task without a trigger for this template.
    """
    checked = CheckedTask(task.with_prompts("chat") if chat else task)
    trigger = checked.triggers.get("chain")
    if trigger is None:
        raise OptionError(f"task {type(task).__name__} has no answer trigger for its template 'chain': set `triggers`")
    result = []
    for row in rows:
        state = checked.start(checked.question_of(row))
        sampling = {**checked.sampling.get("chain", {}), "max_tokens": max_tokens, "temperature": 0.0}
        sampling["stop"] = (*sampling.get("stop", ()), trigger)
        request = Request(
            prompt=checked.prompt("chain", state),
            sampling=Sampling(**sampling),
            purpose="answer",
            answer_trigger=trigger,
            answer_tokens=ANSWER_TOKENS,
            choices=tuple(f" {choice}" for choice in checked.choices(state)),
        )
        result.append(Rationale(checked, request, checked.reference_of(row)))
    return result


def questions(task: str, data: str, limit: int, max_tokens: int, seed: int, chat: bool = False) -> list[Rationale]:
    """Return the rationales of a random selection of rows. Raises OptionError for fewer than two rows."""
    shuffled = list(rows(data))
    random.Random(seed).shuffle(shuffled)
    result = rationales(load_task(task), islice(shuffled, limit), max_tokens, chat)
    if len(result) < 2:
        raise OptionError(f"{data} has {len(result)} rows, but at least 2 are needed: give a larger file")
    return result


def batches(asked: Sequence[Rationale]) -> list[Sequence[Rationale]]:
    """Split into batches of `BATCH`."""
    return [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]


@dataclass
class Answers:
    """Answers after a part of each rationale, and after the whole rationale."""

    given: list[str | None]
    whole: list[str | None]
    scores: list[float]
    """Scores of `given`."""
    full: list[float]
    """Scores of `whole`."""

    @classmethod
    def of(cls, asked: Sequence[Rationale], given: Sequence[Any], whole: Sequence[Any]) -> Answers:
        """Canonicalize and score the answers to these questions."""

        def apply(method: Callable[[Rationale, Any], Any], answers: Sequence[Any]) -> list[Any]:
            return [method(rationale, answer) for rationale, answer in zip(asked, answers, strict=True)]

        read, right = Rationale.read, Rationale.right
        return cls(apply(read, given), apply(read, whole), apply(right, given), apply(right, whole))

    @classmethod
    def joined(cls, several: Sequence[Answers]) -> Answers:
        """Concatenate several batches of answers."""
        return cls(*([value for answers in several for value in getattr(answers, field.name)] for field in fields(cls)))

    @property
    def unchanged(self) -> list[float]:
        """1 for each answer that equals the answer after the whole rationale, otherwise 0."""
        return [float(answer == full) for answer, full in zip(self.given, self.whole, strict=True)]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def agreement(self) -> float:
        return statistics.fmean(self.unchanged)

    def against_whole(self) -> tuple[str, float]:
        """Describe accuracy and agreement against whole rationales; also return the difference's lower bound."""
        change = paired([score - full for score, full in zip(self.scores, self.full, strict=True)])
        texts = [estimate(values).format(".0%") for values in (self.scores, self.full, self.unchanged)]
        difference = f"{100 * change.low:.0f} to {100 * change.high:.0f} points"
        note = f"accuracy {texts[0]}, with whole rationales {texts[1]}, difference {difference}"
        return f"{note}; {texts[2]} of the answers unchanged", change.low


def decode_whole(engine: Engine, asked: Sequence[Rationale], window: int) -> list[Completion]:
    """Decode every rationale to its end, and record the tokens after each iteration."""
    with load_decoder("fastcot", engine=engine, window=window, trajectory=True) as decoder:
        return decoder.generate([rationale.request for rationale in asked])


def by_iteration(
    engine: Engine,
    asked: Sequence[Rationale],
    decoded: Sequence[Completion],
    iterations: Sequence[int],
    glimpse: bool = True,
) -> list[Answers]:
    """Return the answers that a cap at each iteration would give for rationales that were decoded whole.

    `glimpse` includes the approximate tokens in the truncated rationale.
    """

    def cut(completion: Completion, cap: int) -> list[int] | None:
        if cap == 0:
            return []
        if cap > len(completion.trajectory):  # the rationale ended before the cap
            return None
        exact, approximate = completion.trajectory[cap - 1]
        return [*completion.tokens[:exact], *(approximate if glimpse else ())]

    return _after(engine, asked, decoded, [[cut(completion, cap) for completion in decoded] for cap in iterations])


def masked(
    engine: Engine, asked: Sequence[Rationale], shares: Sequence[float], seeds: int | None = None
) -> list[Answers]:
    """Return the answers after masking each share of every rationale's tokens (section 5.2).

    Masks the end, or random positions with `seeds` seeds, whose answers are concatenated.
    """
    with load_decoder("ar", engine=engine) as decoder:
        decoded = decoder.generate([rationale.request for rationale in asked])
    rationales = [next(part.text for part in completion.parts if part.kind == "exact") for completion in decoded]
    texts = [engine.codec.encode(rationale) for rationale in rationales]
    tokenizer = engine.loaded.tokenizer
    mask = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def with_mask(number: int, share: float, seed: int) -> list[int] | None:
        tokens = list(texts[number])
        count = round(share * len(tokens))
        positions: Sequence[int] = range(len(tokens) - count, len(tokens))
        if seeds is not None:
            positions = random.Random(f"{seed}/{asked[number].request.prompt}").sample(range(len(tokens)), count)
        for position in positions:
            tokens[position] = mask
        return tokens if count else None

    results = []
    for share in shares:
        pieces = [[with_mask(number, share, seed) for number in range(len(asked))] for seed in range(seeds or 1)]
        results.append(Answers.joined(_after(engine, asked, decoded, pieces)))
    return results


def _after(
    engine: Engine,
    asked: Sequence[Rationale],
    decoded: Sequence[Completion],
    pieces: Sequence[Sequence[Sequence[int] | None]],
) -> list[Answers]:
    """Return the answers after each row of pieces, followed by the trigger.

    A row has one piece of token ids per rationale; None is the whole rationale.
    """
    whole = [rationale.answer(completion) for rationale, completion in zip(asked, decoded, strict=True)]
    requests = []
    for rationale, piece in (pair for row in pieces for pair in zip(asked, row, strict=True)):
        if piece is not None:
            request = rationale.request
            prompt = engine.codec.encode_prompt(request.prompt)
            ids = (*prompt, *piece, *engine.codec.encode(request.answer_trigger or ""))
            sampling = request.sampling.model_copy(update={"max_tokens": ANSWER_TOKENS})
            requests.append(Request(prompt=ids, sampling=sampling, choices=request.choices, purpose=request.purpose))
    with load_decoder("ar", engine=engine) as decoder:
        completions = iter(decoder.generate(requests))
    results = []
    for row in pieces:
        given = [
            full if piece is None else rationale.answer(next(completions))
            for rationale, full, piece in zip(asked, whole, row, strict=True)
        ]
        results.append(Answers.of(asked, given, whole))
    return results


def find_cap(
    iterations: Sequence[int], answers: Sequence[Answers], loss: float, agreement: float | None = None
) -> tuple[int | None, str]:
    """Return the cap of a stop rule, and a description. Without such a cap, it is None.

    The paper's rule (section 4.4) is the smallest cap with an accuracy at most `loss` below that with whole rationales.
    With `agreement`, our rule also asks for at least this share of unchanged answers, and that all larger caps stay
    within both limits.
    """
    full, found = statistics.fmean(answers[0].full), None
    for iteration, truncated in sorted(zip(iterations, answers, strict=True), key=lambda pair: -pair[0]):
        if truncated.accuracy >= full - loss and truncated.agreement >= (agreement or 0.0):
            found = iteration, truncated
        elif agreement is not None:
            break
    if found is None:
        kept = "" if agreement is None else f" and {100 * agreement:g}% of the answers"
        return None, f"no cap keeps accuracy within {100 * loss:g} points{kept}"
    cap, at_cap = found
    note, low = at_cap.against_whole()
    if low < -loss:
        note += f"; {len(answers[0].given)} questions are too few to guarantee a loss of at most {100 * loss:g} points"
    return cap, f"cap {cap}: {note}"
