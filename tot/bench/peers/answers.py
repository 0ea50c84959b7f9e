"""What eight-bit weights change: greedy answers to GSM8K questions, beside those of our own as it is.

Both ways of answering are asked for: at once, and after working the question out, where one other word may lead
elsewhere. Worked examples come before each question. Few are asked at once: more may be computed without eight bits.
What is packed beside a text changes some words, too, and so does float32 instead of bfloat16: that is told first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tot.bench.packed import few_shot_text
from tot.bench.peers.goals import Goal
from tot.bench.peers.here import Tot
from tot.decoders.request import Request, Sampling
from tot.task import Task

MOST = 100
"""Questions."""
_EXAMPLES, _NEW = 4, 100
_TOGETHER = 8
_LEAST = 0.95
_ENDS = {"at once": "\nThe answer is", "worked out": "\n"}


def same(
    ours: Tot,
    others: Sequence[Tot],
    task: Task,
    questions: Sequence[str],
    say: Callable[[str], None],
    controls: Sequence[Tot] = (),
) -> list[Goal]:
    """By side and way of answering, the share of the questions that have the same answer. `controls` have no goal, nor
    has our own side with other texts beside each."""
    goals = []
    for way in _ENDS:
        say(f"{len(questions)} answers {way} …")
        expected = answers(ours, task, questions, way)
        again = answers(ours, task, questions[::-1], way)[::-1]
        given: list[tuple[str, list[Hashable], float | None]] = [(f"{ours.name}, packed otherwise", again, None)]
        given += [(side.name, answers(side, task, questions, way), None) for side in controls]
        given += [(side.name, answers(side, task, questions, way), _LEAST) for side in others]
        for name, found, least in given:
            kept = [a == b for a, b in zip(found, expected, strict=True)]
            what = f"the same greedy answers, {way}: {name} / {ours.name}"
            goals.append(Goal(what, f"{sum(kept)} of {len(kept)}", [sum(kept) / len(kept)], least, share=True))
    return goals


def answers(side: Tot, task: Task, questions: Sequence[str], way: str) -> list[Hashable]:
    """Greedy answers, as the task compares them; None for one that can't be read."""
    head, end = few_shot_text(_EXAMPLES), _ENDS[way]
    sampling = Sampling(max_tokens=_NEW, temperature=0.0, stop=("\n\n", "Question:"))
    asked = [Request(prompt=f"{head}\n\nQuestion: {question}{end}", sampling=sampling) for question in questions]
    few = (asked[i : i + _TOGETHER] for i in range(0, len(asked), _TOGETHER))
    done = (completion for requests in few for completion in side.decoder.generate(requests))
    read = (task.parse_answer(end + completion.text) for completion in done)
    return [None if answer is None else task.canonical(answer) for answer in read]
