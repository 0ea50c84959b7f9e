"""Votes that stop when they are sure: results one by one, cancelled samples, and the posterior."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tot import BFS, SelfConsistency, Task, solve
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders import Completion, Meter, OptionError, Request, Usage
from tot.running import run_to_end
from tot.search.certainty import Curve, Features, to_json
from tot.search.checkpoint import Checkpoint
from tot.search.votes import Ballot, stays_ahead


class Streamed:
    """Ends one sample at a time, in the order of the requests; call `release` for the next."""

    name = "streamed"

    def __init__(self, *replies: str, at_once: bool = False) -> None:
        self._replies = iter(replies)
        self._at_once = at_once
        self._waiting: list[tuple[asyncio.Future[list[Completion]], str]] = []
        self.started = 0
        self.ended: list[str] = []
        self.batches: list[int] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError("searches call start()")

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[asyncio.Future[list[Completion]]]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self._waiting += zip(futures, self._replies, strict=False)
        self.batches.append(len(futures))
        self.started += len(futures)
        if not self.ended or len(futures) > 1:
            loop.call_soon(self.release)
        for _ in futures if self._at_once else ():
            loop.call_soon(self.release)
        return futures

    def release(self, *_: Any) -> None:
        self._waiting = [pair for pair in self._waiting if not pair[0].done()]
        if self._waiting:
            future, text = self._waiting.pop(0)
            self.ended.append(text)
            future.set_result([Completion(text, (), 0.0, "eos", Usage(new_tokens=len(text)))])


@pytest.fixture
def chained(letters: Any) -> type[Task]:
    """A task whose solutions end in a digit, the answer."""
    fields = {
        "templates": letters.templates | {"chain": "chain", "program": "program"},
        "parse_answer": lambda self, text: text[-1] if text[-1:].isdigit() else None,
    }
    return type("Chained", (letters,), fields)


def vote(task: Any, *replies: str, search: Any = None, at_once: bool = False, **options: Any) -> tuple[Any, Streamed]:
    decoder = Streamed(*replies, at_once=at_once)
    search = search or SelfConsistency(samples=8, until=0.9, at_once=4)
    return solved(task, search, decoder.release, decoder=decoder, **options), decoder


def solved(task: Any, search: Any, watch: Any, checkpoint: Any = None, **options: Any) -> Any:
    config = SearchConfig.of(None, {"search": search, **options})
    return run_to_end(run_search(task, "q", config, watch=watch, checkpoint=checkpoint))


def test_the_vote_stops_when_its_leader_cannot_be_caught(chained: Any) -> None:
    search = SelfConsistency(samples=8, until=0.95, at_once=4)
    solution, decoder = vote(chained, "a 1", "b 1", "c 1", "d 2", "e 2", "f 2", "g 2", "h 2", search=search)
    assert (solution.answer, solution.votes) == ("1", (3, 3))
    assert decoder.started == 6  # four at once, and one for each sample that ended before the vote was sure


def test_unfinished_samples_are_cancelled_and_new_ones_fill_their_rows(chained: Any) -> None:
    solution, decoder = vote(chained, "a 1", "b 2", "c 1", "d 1", "e 1", "f 1", "g 1", "h 1")
    assert decoder.batches[0] == 4
    assert set(decoder.batches[1:]) == {1}
    assert all(future.cancelled() for future, _ in decoder._waiting)
    assert solution.votes == (3, 4)


def test_a_verified_answer_ends_the_vote(chained: Any) -> None:
    sure = type("Sure", (chained,), {"verify": lambda self, question, answer: answer == "3"})
    solution, _ = vote(sure, "a 1", "b 3", "c 1", "d 1")
    assert (solution.answer, solution.solved, len(solution.tree) - 1) == ("3", True, 2)


def test_the_tokens_of_cancelled_samples_are_counted(chained: Any, tiny: Any) -> None:
    with tiny() as decoder:
        search = SelfConsistency(samples=6, until=0.6, at_once=6)
        answers = itertools.count()
        task = type("Always", (chained,), {"parse_answer": lambda self, text: next(answers) and "1"})
        solution = solve(task, "q", decoder=decoder, search=search, max_tokens=40, temperature=1.0)
    assert solution.usage.new_tokens >= sum(
        len(part.tokens) for node in solution.tree if node.thought for part in node.thought.drawn.values()
    )
    assert solution.calls == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("until=0", "greater than 0"),
        ("until=1.5", "less than or equal to 1"),
        ("until=0.9,samples=1", "until needs at least 2 samples, not 1"),
        ("until=0.9,samples=4,at_once=5", "until needs at least 5 samples, not 4"),
        ("at_once=3", "at_once has an effect only with until"),
        ("until=0.9,aggregate=best", "until counts votes"),
    ],
)
def test_invalid_options_are_rejected(chained: Any, options: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        solve(chained, "q", search=f"self-consistency:{options}")


def test_a_killed_vote_resumes_with_the_same_samples(chained: Any, scripted: Any, tmp_path: Path) -> None:
    replies = ["a 1", "b 2", "c 3", "d 1", "e 2", "f 1"]
    search = SelfConsistency(samples=6, until=0.99, at_once=3)
    whole, _ = vote(chained, *replies, search=search, checkpoint=Checkpoint.create(tmp_path / "whole.jsonl"))
    lines = (tmp_path / "whole.jsonl").read_text().splitlines()
    steps = [line for line in lines if '"step": "expand"' in line]
    assert len(steps) == 6
    (tmp_path / "killed.jsonl").write_text("\n".join([*lines[:2], *steps[:2]]) + "\n")
    decoder = Streamed("c 3", "d 1", "e 2", "f 1")
    killed = Checkpoint.resume(tmp_path / "killed.jsonl")
    resumed = solved(chained, search, decoder.release, killed, decoder=decoder)
    assert decoder.batches[0] == 3  # two unfinished samples of the killed run, and a new one
    assert [node.thought for node in resumed.tree] == [node.thought for node in whole.tree]


# -- trees -------------------------------------------------------------------------------------------------------


ENDING = {"grow": ["a!", "b!", "c", "d"], "grow c": list("efgh"), "grow d": list("ijkl")}
ENDING |= {key: [f"{reply}!" for reply in ENDING[key]] for key in ("grow c", "grow d")}


@pytest.mark.parametrize(
    ("select", "until", "leaves"), [("greedy", None, 10), ("greedy", 0.7, 2), ("all", None, 4), ("all", 0.7, 2)]
)
def test_a_tree_stops_when_the_vote_of_its_leaves_is_sure(
    letters: Any, scripted: Any, select: str, until: float | None, leaves: int
) -> None:
    fields = {
        "is_terminal": lambda self, state: state.text.endswith("!"),
        "answer_at": lambda self, state: "7" if state.text.endswith("!") else None,
    }
    decoder = scripted(ENDING)
    search = BFS(thoughts=4, breadth=4, depth=3, select=select, aggregate="vote", until=until)
    solution = solve(type("Ending", (letters,), fields), "q", decoder=decoder, search=search, evaluator="random")
    ended = [node for node in solution.tree if node.thought and node.thought.text.endswith("!")]
    assert (solution.answer, len(ended)) == ("7", leaves)


# -- two models ---------------------------------------------------------------------------------------------------


def escalated(task: Any, small: Streamed, large: Streamed, **options: Any) -> Any:
    def release(session: Any) -> None:
        (large if large.started else small).release()

    search = SelfConsistency(samples=6, until=0.9, at_once=4)
    decoder = {"generate": small, "escalate": large}
    return solved(task, search, release, decoder=decoder, **options)


def test_the_larger_model_decides_alone_if_the_smaller_is_not_sure(chained: Any) -> None:
    small, large = Streamed("a 1", "b 2", "c 1", "d 1"), Streamed("e 3", "f 3", "g 3", "h 3", "i 3", "j 3")
    solution = escalated(chained, small, large)
    assert (solution.answer, solution.votes) == ("3", (2, 2))
    assert all(node.pruned for node in solution.tree if node.thought and node.thought.text in ("a 1", "b 2"))


def test_the_smaller_model_decides_if_the_larger_has_no_answer(chained: Any) -> None:
    small, large = Streamed("a 1", "b 2", "c 1", "d 1"), Streamed(*("no",) * 6)
    assert escalated(chained, small, large).answer == "1"
    small, large = Streamed("a 1", "b 2", "c 1", "d 1"), Streamed(*("no",) * 5, "f 3")
    assert escalated(chained, small, large).answer == "3"


# -- the posterior ------------------------------------------------------------------------------------------------


def test_the_posterior_of_many_ballots_equals_its_definition() -> None:
    # The leader, its rival and the others have 3, 2 and 1 in Polya's urn; the leader is one ballot ahead.
    def rising(start: int, steps: int) -> Fraction:
        return Fraction(math.comb(start + steps - 1, steps))

    n = 64
    ahead = sum(
        rising(3, i) * rising(2, j) * (Fraction(1) if 1 + i > j else Fraction(1, 2))
        for i in range(n + 1)
        for j in range(min(n - i, i + 1) + 1)
    )
    assert stays_ahead([Ballot("a"), Ballot("a"), Ballot("b")], n) == pytest.approx(float(ahead / rising(6, n)))


@pytest.mark.parametrize(("replies", "known"), [("no", False), ("so 3", True)])
def test_the_certainty_is_not_that_of_a_second_model_without_an_answer(
    chained: Any, tmp_path: Path, replies: str, known: bool
) -> None:
    coefficients = Features(share=2, agree=0, weight=0)
    fitted = Curve(task=chained.name, model=None, questions=50, intercept=-1, coefficients=coefficients, weights=(0, 1))
    (tmp_path / "curves.json").write_text(json.dumps(to_json([fitted])))
    small, large = Streamed("a 1", "b 2", "c 1", "d 1"), Streamed(*[replies] * 6)
    small.model, large.model = "small", "large"  # type: ignore[attr-defined]
    solution = escalated(chained, small, large, certainty=str(tmp_path / "curves.json"))
    assert (solution.answer, solution.certainty is not None) == ("3" if known else "1", known)
