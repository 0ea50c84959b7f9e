"""Auto: the order of samples, when they stop, two models, resuming, and the search that it chooses for a task."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tot import BFS, BestFirst, Refine, Task
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders import Completion, Meter, OptionError, Request, TaskError, Usage
from tot.registry import load_task, parts_of
from tot.running import run_to_end
from tot.search.auto import Auto
from tot.search.calibration import Calibration, Source, to_json
from tot.search.checkpoint import Checkpoint

NONE = math.e
"""v(none) without samples, with the calibration of these tests."""


class Streamed:
    """Ends one sample at a time, in the order of the requests; call `release` for the next."""

    name = "streamed"

    def __init__(self, *replies: str) -> None:
        self._replies = iter(replies)
        self._waiting: list[tuple[asyncio.Future[list[Completion]], str]] = []
        self.requests: list[Request] = []
        self.ended: list[str] = []
        self.batches: list[int] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError("searches call start()")

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[asyncio.Future[list[Completion]]]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self._waiting += zip(futures, self._replies, strict=False)
        self.batches.append(len(futures))
        self.requests += requests
        if not self.ended or len(futures) > 1 or len(self._waiting) == 1:
            loop.call_soon(self.release)
        return futures

    def release(self, *_: Any) -> None:
        self._waiting = [pair for pair in self._waiting if not pair[0].done()]
        if self._waiting:
            future, text = self._waiting.pop(0)
            self.ended.append(text)
            future.set_result([completion(text)])

    @property
    def unfinished(self) -> list[asyncio.Future[list[Completion]]]:
        return [future for future, _ in self._waiting]


class Listed:
    """Writes these texts, one a sample."""

    def __init__(self, *replies: str) -> None:
        self._replies = iter(replies)
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [completion(next(self._replies)) for request in requests for _ in range(request.sampling.n)]


class Silent(Streamed):
    """Ends no sample."""

    def release(self, *_: Any) -> None:
        pass


def completion(text: str) -> Completion:
    return Completion(text, (), 0.0, "eos", Usage(new_tokens=5))


@pytest.fixture
def chained(letters: Any) -> type[Task]:
    """A task whose solutions end in a digit, the answer."""
    fields = {
        "templates": letters.templates | {"chain": "chain", "program": "program"},
        "parse_answer": lambda self, text: text[-1] if text[-1:].isdigit() else None,
    }
    return type("Chained", (letters,), fields)


@pytest.fixture
def own(chained: Any, tmp_path: Path) -> Any:
    """Write a calibration of the task: k votes of a chain weigh (1 + k) ** 2."""

    def write(others: float = 0, gains: Sequence[float] = (0.3, 0.2, 0.1), **tokens: float) -> str:
        lengths = tokens or {"chain": 10}
        sources = {name: Source(weight=2, others=others, tokens=length) for name, length in lengths.items()}
        about = {"task": chained.name, "model": None, "questions": 50, "none": 1}
        one = Calibration(**about, sources=sources, gains=tuple(gains))
        path = tmp_path / "own.json"
        path.write_text(json.dumps(to_json([one])))
        return str(path)

    return write


def solved(task: Any, search: Any, decoder: Any, watch: Any = None, checkpoint: Any = None, **options: Any) -> Any:
    config = SearchConfig.of(None, {"search": search, "decoder": decoder, **options})
    watch = watch or getattr(decoder, "release", None)
    return run_to_end(run_search(task, "q", config, watch=watch, checkpoint=checkpoint))


# -- one model ----------------------------------------------------------------------------------------------------


def test_sources_take_turns_the_cheap_one_first_and_begin_with_a_greedy_sample(chained: Any, own: Any) -> None:
    path = own(chain=10, program=5)
    decoder = Streamed("a 1", "b 2", "c 3", "d 4", "e 5")
    search = Auto(samples=5, until=1, together=1, solutions=("chain", "program"))
    solved(chained, search, decoder, calibration=path)
    order = [request.prompt[-1].content for request in decoder.requests]
    assert order == ["program", "chain", "program", "chain", "program"]
    assert [request.sampling.temperature == 0 for request in decoder.requests] == [True, True, False, False, False]


def test_a_sure_answer_stops_the_search_and_its_unfinished_samples(chained: Any, own: Any) -> None:
    decoder = Streamed(*(f"{name} 1" for name in "abcdefgh"))
    solution = solved(chained, Auto(until=0.85, together=3), decoder, calibration=own())
    assert (solution.answer, solution.votes) == ("1", (3, 3))
    assert 9 / (9 + NONE) < 0.85 < solution.certainty == pytest.approx(16 / (16 + NONE))
    assert solution.gain == pytest.approx((1 - solution.certainty) * 0.1)
    assert len(decoder.requests) == 5  # three at once, and one for each sample that ended before the answer was sure
    assert all(future.cancelled() for future in decoder.unfinished)


def test_a_verified_answer_stops_the_search(chained: Any, own: Any) -> None:
    checked = type("Chained", (chained,), {"verify": lambda self, question, answer: answer == "3"})
    solution = solved(checked, Auto(together=1), Streamed("a 1", "b 3", "c 1"), calibration=own())
    assert (solution.answer, solution.solved, solution.certainty, solution.calls) == ("3", True, 1.0, 2)


def test_a_search_begins_no_sample_below_the_gain(chained: Any, own: Any) -> None:
    path = own(gains=(0.3, 0.2, 0.0))
    search = Auto(together=1, until=1, gain=0.2 * NONE / (4 + NONE) - 0.001)
    assert solved(chained, search, Streamed(*["a 1"] * 8), calibration=path).votes == (2, 2)
    search = search.model_copy(update={"gain": search.gain + 0.002})
    assert solved(chained, search, Streamed(*["a 1"] * 8), calibration=path).calls == 1


def test_samples_are_the_limit_with_and_without_answers(chained: Any, own: Any) -> None:
    solution = solved(chained, Auto(samples=3, together=2), Streamed(*["no"] * 4), calibration=own())
    assert (solution.answer, solution.certainty, solution.gain, solution.calls) == (None, None, None, 3)


def test_a_text_that_cannot_be_read_counts_as_a_sample(chained: Any, own: Any) -> None:
    solution = solved(chained, Auto(samples=3, together=1), Streamed("", "", "a 1"), calibration=own(others=1))
    assert (solution.answer, len(solution.tree) - 1) == ("1", 1)
    assert solution.certainty == pytest.approx(4 / (4 + NONE * (1 + 3)))


def test_greedy_decoding_gives_one_sample_of_each_source(chained: Any) -> None:
    decoder = Listed("a 1", "b 2", "c 1")
    search = Auto(solutions=("chain", "program"))
    solution = solved(chained, search, decoder, generator="sample:temperature=0")
    assert sorted(request.prompt[-1].content for request in decoder.requests) == ["chain", "program"]
    assert solution.votes == (1, 2)


def test_without_a_calibration_the_search_stops_but_the_certainty_is_not_known(chained: Any) -> None:
    solution = solved(chained, Auto(samples=20, together=1, until=0.6), Streamed(*["a 1"] * 20))
    assert (solution.answer, solution.certainty, solution.gain) == ("1", None, None)
    assert 1 < solution.calls < 20


@pytest.mark.parametrize("seconds", [1e-9, 0.05])
def test_a_budget_shorter_than_a_sample_gives_no_answer(
    chained: Any, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("tot.run._GRACE", 0.01)
    solution = solved(chained, Auto(), Silent(*["a 1"] * 8), budget={"seconds": seconds})
    assert solution.answer is None
    assert solution.stopped.startswith("budget: seconds (")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("until=0", "greater than 0"),
        ("until=1.5", "less than or equal to 1"),
        ("gain=1", "less than 1"),
        ("together=0", "greater than or equal to 1"),
    ],
)
def test_invalid_options_are_rejected(chained: Any, options: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        solved(chained, f"auto:{options}", Listed())


# -- two models ---------------------------------------------------------------------------------------------------


def escalated(task: Any, small: Streamed, large: Streamed, path: str, **changes: Any) -> Any:
    def release(_: Any) -> None:
        (large if large.requests else small).release()

    search = Auto(**{"samples": 6, "until": 0.85, "together": 2, **changes})
    return solved(task, search, {"generate": small, "escalate": large}, release, calibration=path)


def test_the_larger_model_decides_alone_if_the_smaller_is_not_sure(chained: Any, own: Any) -> None:
    small, large = Streamed("a 1", "b 2", "c 1"), Streamed(*["d 3"] * 6)
    solution = escalated(chained, small, large, own())
    assert (solution.answer, solution.votes, len(small.requests)) == ("3", (3, 3), 2)
    assert solution.certainty == pytest.approx(16 / (16 + NONE))
    assert all(node.pruned for node in solution.tree if node.thought and node.thought.text in ("a 1", "b 2"))


def test_the_larger_model_is_not_asked_if_the_smaller_is_sure(chained: Any, own: Any) -> None:
    large = Streamed("c 3")
    assert escalated(chained, Streamed("a 1", "b 1"), large, own(), until=0.75).answer == "1"
    assert large.requests == []


def test_the_smaller_model_decides_if_the_larger_has_no_answer(chained: Any, own: Any) -> None:
    solution = escalated(chained, Streamed("a 1", "b 2"), Streamed(*["no"] * 6), own(others=1))
    assert solution.answer == "1"
    assert solution.certainty == pytest.approx(4 / (8 + NONE * (1 + 2)))  # only its own samples count


def test_answers_of_two_models_do_not_vote_together(chained: Any, own: Any) -> None:
    """The larger model's samples end at the same time, and the first of them has no answer."""
    decoders = {"generate": Listed("a 1", "b 1", "c 2"), "escalate": Listed("no", "e 1", "f 1")}
    search = Auto(samples=3, together=3, until=0.59)
    solution = solved(chained, search, decoders, calibration=own(), reproducible=True)
    assert (solution.answer, solution.votes) == ("1", (2, 2))


# -- resuming -----------------------------------------------------------------------------------------------------


def test_a_killed_search_resumes_with_the_same_samples(chained: Any, own: Any, tmp_path: Path) -> None:
    search, path = Auto(samples=6, until=1, together=3), own()
    decoder = Streamed("a 1", "b 2", "c 3", "d 1", "e 2", "f 1")
    began = Checkpoint.create(tmp_path / "whole.jsonl")
    whole = solved(chained, search, decoder, checkpoint=began, calibration=path)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines()
    steps = [line for line in lines if '"step": "expand"' in line]
    assert len(steps) == 6
    (tmp_path / "killed.jsonl").write_text("\n".join([*lines[:2], *steps[:2]]) + "\n")
    decoder = Streamed("c 3", "d 1", "e 2", "f 1")
    killed = Checkpoint.resume(tmp_path / "killed.jsonl")
    resumed = solved(chained, search, decoder, checkpoint=killed, calibration=path)
    assert decoder.batches[0] == 3  # two unfinished samples of the killed run, and a new one
    assert [node.thought for node in resumed.tree] == [node.thought for node in whole.tree]
    killed.close()
    own(others=1)
    killed = Checkpoint.resume(tmp_path / "killed.jsonl")
    with pytest.raises(TaskError, match=r"holds another run: its calibrations is .* resume it with the options"):
        solved(chained, search, Streamed(), checkpoint=killed, calibration=path)


# -- the choice of a search ---------------------------------------------------------------------------------------


def test_the_search_suits_the_task(letters: Any) -> None:
    doing = type("Doing", (letters,), {"act": lambda self, state, thought: None})
    for task, chosen in ((letters(), BFS), (doing(), Refine), (load_task("blocksworld"), BestFirst)):
        assert type(Auto().recipe(task, None)["search"]) is chosen


def test_options_are_refused_for_a_task_that_is_not_sampled(letters: Any) -> None:
    with pytest.raises(OptionError, match="auto is BFS for the task letters, without samples, until: leave them out"):
        parts_of(letters(), "auto:samples=3,until=0.9")


@pytest.mark.parametrize(("confined", "sources"), [(True, {"chain", "program"}), (False, {"chain"})])
def test_programs_are_left_out_where_they_cannot_be_confined(
    monkeypatch: pytest.MonkeyPatch, confined: bool, sources: set[str]
) -> None:
    monkeypatch.setattr("tot.search.auto.can_confine", lambda: confined)
    task = load_task("gsm8k").with_prompts("chat")
    for search in ("auto", "auto:solutions=program+chain"):
        assert set(parts_of(task, search)["search"].solutions) == sources
