"""Vote: candidates side by side, numbered in a new random order for each vote; vote shares are mapped back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot import BFS, Solution, Task, Vote, solve
from tot.decoders import Completion, Request, Usage

VOTE = "{% for candidate in candidates %}{{ loop.index }}={{ candidate }};{% endfor %}"


@pytest.fixture
def election(letters: Any) -> type[Task]:
    """Letters with a ballot as the vote prompt: "1=b;2=a;"."""
    return type("Election", (letters,), {"templates": letters.templates | {"vote": VOTE}})


class Voter:
    """Propose the candidates, and vote for `choose(ballot)`, where the ballot maps numbers to candidates."""

    def __init__(self, candidates: Sequence[str], choose: Callable[[dict[int, str]], str]) -> None:
        self.candidates = candidates
        self.choose = choose
        self.ballots: list[dict[int, str]] = []
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [reply for request in requests for reply in self._replies(request)]

    def _replies(self, request: Request) -> list[Completion]:
        if request.purpose == "generate":
            return [self._completion(text) for text in self.candidates]
        if request.purpose == "answer":
            return [self._completion("done")]
        pairs = re.findall(r"(\d+)=([^;]*);", str(request.prompt[-1]))
        self.ballots.append({int(number): candidate for number, candidate in pairs})
        return [self._completion(self.choose(self.ballots[-1]))]

    @staticmethod
    def _completion(text: str, reason: Any = "eos") -> Completion:
        return Completion(text, (), 0.0, reason, Usage(new_tokens=5))


def hold(task: Any, voter: Any, samples: int = 5, **options: Any) -> Solution:
    search = BFS(thoughts=len(voter.candidates), breadth=9, depth=2)
    return solve(task, "q", decoder=voter, search=search, evaluator=Vote(samples=samples), **options)


def values(solution: Solution) -> dict[str, float | None]:
    return {node.thought.text: node.value for node in solution.tree if node.thought}


def place(ballot: dict[int, str], candidate: str) -> int:
    return next(number for number, text in ballot.items() if text == candidate)


def test_every_ballot_has_every_candidate_once_in_its_own_order(election: Any) -> None:
    voter = Voter("abcde", lambda ballot: "1")
    hold(election, voter, samples=40)
    assert len(voter.ballots) == 40
    assert all(sorted(ballot.values()) == list("abcde") for ballot in voter.ballots)
    assert all(list(ballot) == [1, 2, 3, 4, 5] for ballot in voter.ballots)
    assert len({tuple(ballot.values()) for ballot in voter.ballots}) >= 20  # of 120
    assert {ballot[1] for ballot in voter.ballots} == set("abcde")  # every candidate appears in every position


@pytest.mark.parametrize("reply", ["", "none of them", "6", "0", "the 1.5th", "best: 77"])
def test_an_unparsed_vote_counts_for_no_candidate(election: Any, reply: str) -> None:
    replies = iter(["a", reply, "a", reply])
    voter = Voter("abcde", lambda ballot: str(place(ballot, "a")) if (choice := next(replies)) == "a" else choice)
    solution = hold(election, voter, samples=4)
    assert values(solution) == {"a": 0.5, "b": 0, "c": 0, "d": 0, "e": 0}
    assert solution.parse_failures == 2


def test_votes_cut_off_by_a_budget_leave_no_values_and_are_not_parse_failures(election: Any) -> None:
    class Cut(Voter):
        def _replies(self, request: Request) -> list[Completion]:
            cut = request.purpose == "evaluate"
            return [self._completion("no", "budget")] if cut else super()._replies(request)

    solution = hold(election, Cut("ab", lambda ballot: "1"))
    assert values(solution) == {"a": None, "b": None}
    assert solution.parse_failures == 0


@pytest.mark.parametrize(
    ("reply", "candidates", "choice"),
    [
        ("3", 5, 3),
        ("10", 10, 10),
        ("10", 5, None),
        ("I choose 2 out of 5.", 5, 2),
        ("2 of the 5", 5, 2),
        ("Out of 5 choices, choice 4.", 5, 4),
        ("The best choice is 3, because choice 1 is too short.", 5, 3),
        ("Choice 1 is dull. Choice 2 is wrong. The best choice is 4.", 5, 4),
        ("The best choice is 1. No, on reflection the best choice is 2", 5, 2),
        ("Choice 1 is weak, so I take choice 2", 5, 2),
        ("Option 3", 3, 3),
        ("best: **2**", 3, 2),
        ("THE BEST CHOICE IS 2", 3, 2),
        ("Choice 1 is the best. Choice 2 is vague.", 3, 1),
        ("There are 12 words in it: 2", 3, 2),
        ("best choice: 9, else 2", 3, 2),
        ("1.5", 3, None),
        ("v2", 3, None),
        ("none", 3, None),
        ("", 3, None),
    ],
)
def test_a_vote_is_the_candidate_that_the_reply_calls_best(
    election: Any, reply: str, candidates: int, choice: int | None
) -> None:
    assert election().parse_vote(reply, candidates) == choice
