"""User-defined parts that raise or return a wrong type: a one-line error names the part, and results are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import BFS, DFS, MCTS, Evaluator, Generator, Search, Task, evaluate, solve
from tot.decoders import Completion, Usage
from tot.decoders.errors import OptionError, TaskError, TotError

SEARCH = BFS(thoughts=2, breadth=1, depth=3)


class Numbers(Task):
    templates: ClassVar = {"thought": "{{ question }}", "value": "rate", "answer": "answer {{ thoughts[-1].thought }}"}
    depth = 3

    def heuristic(self, state: Any) -> float:
        return float(len(state.thoughts))


class Counts:
    """A decoder that replies with numbers, and can fail from the third request on."""

    chats = False

    def __init__(self, fault: Any = None) -> None:
        self.requests, self.fault = 0, fault

    def generate(self, requests: Any) -> Any:
        self.requests += len(requests)
        if self.fault is not None and self.requests >= 3:
            if isinstance(self.fault, BaseException):
                raise self.fault
            return self.fault
        texts = [f"{self.requests}.{i}" for request in requests for i in range(request.sampling.n)]
        return [Completion(text, (), 0.0, "eos", Usage(new_tokens=1)) for text in texts]


def solved(task: Any = Numbers, question: Any = "q", **options: Any) -> Any:
    given = {"decoder": Counts(), "search": SEARCH, "evaluator": "heuristic", **options}
    return solve(task, question, **given)


def faulty(method: str, result: Any) -> type[Task]:
    def does(self: Task, *arguments: Any, **named: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    return type("Faulty", (Numbers,), {method: does})


METHODS = ("start", "prompt", "parse_thought", "parse_answer", "canonical", "is_terminal", "heuristic", "step", "key")


@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration(), RecursionError("deep"), MemoryError()])
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_a_task_names_its_method(method: str, error: Exception) -> None:
    search = BFS(thoughts=2, breadth=2, depth=3, aggregate="vote")
    with pytest.raises(TaskError, match=rf"^Faulty\.{method} raised {type(error).__name__}"):
        solved(faulty(method, error), search=search)


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("start", None),
        ("start", 5),
        ("prompt", None),
        ("prompt", "text"),
        ("parse_thought", 5),
        ("canonical", [1]),
        ("heuristic", math.nan),
        ("heuristic", "x"),
        ("heuristic", 10**400),
        ("step", 5),
        ("key", {}),
    ],
)
def test_a_wrong_result_of_a_task_names_its_method(method: str, result: Any) -> None:
    search = BFS(thoughts=2, breadth=2, depth=3, aggregate="vote")
    with pytest.raises(TaskError, match=rf"^Faulty\.{method} gave "):
        solved(faulty(method, result), search=search)


@pytest.mark.parametrize("question", [5, None, b"q", ["q"]])
def test_a_question_that_is_not_a_text_is_rejected(question: Any) -> None:
    with pytest.raises(TaskError, match="not text: give text"):
        solved(question=question)


class Judge(Evaluator):
    values: Any = None

    async def evaluate(self, ctx: Any, nodes: Any) -> Any:
        if isinstance(self.values, BaseException):
            raise self.values
        return self.values(nodes) if callable(self.values) else self.values


@pytest.mark.parametrize("search", [SEARCH, DFS(), MCTS(iterations=4)])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (ValueError("boom"), "Judge.evaluate raised ValueError: boom"),
        (None, "Judge.evaluate raised TypeError"),
        (lambda nodes: [1.0] * (len(nodes) - 1), r"Judge.evaluate returned \d values for \d nodes"),
        (lambda nodes: [1.0] * (len(nodes) + 1), r"Judge.evaluate returned \d values for \d nodes"),
        (lambda nodes: ["x"] * len(nodes), "'x' is not a value"),
        (lambda nodes: [1j] * len(nodes), "1j is not a value"),
        (lambda nodes: [10**400] * len(nodes), "is not a value"),
    ],
)
def test_a_failing_evaluator_is_named(search: Search, values: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        solved(search=search, evaluator=Judge(values=values))


class Writes(Generator):
    thoughts: Any = None

    async def propose(self, ctx: Any, nodes: Any, count: Any) -> Any:
        if isinstance(self.thoughts, BaseException):
            raise self.thoughts
        return self.thoughts


@pytest.mark.parametrize(
    ("thoughts", "message"),
    [
        (ValueError("boom"), "Writes.propose raised ValueError: boom"),
        (None, "Writes.propose raised TypeError"),
        ([], "Writes.propose returned 0 lists of thoughts for 1 nodes"),
        ([None], "None is not a list of thoughts"),
        ([[5]], "5 is not a thought"),
    ],
)
def test_a_failing_generator_is_named(thoughts: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        solved(generator=Writes(thoughts=thoughts))


class Odd(Search):
    what: str

    def steps(self, search: Any) -> Any:
        if self.what == "raises":
            raise ValueError("boom")
        if self.what == "yields text":
            yield "x"
        if self.what == "a foreign node":
            yield search.expand([5], 2)
        yield search.expand([search.best], 2)
        search.best = "x"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raises", "Odd.steps raised ValueError: boom"),
        ("yields text", "Odd.steps yielded 'x': yield search.expand"),
        ("a foreign node", "Odd.steps raised AttributeError"),
        ("a best text", "Odd set search.best to 'x'"),
    ],
)
def test_a_failing_search_is_named(what: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        solved(search=Odd(what=what))


@pytest.mark.parametrize("event", ["on_level", "on_expand", "on_evaluate"])
def test_a_failing_hook_is_named(event: str) -> None:
    with pytest.raises(TaskError, match=f"hook {event} raised ZeroDivisionError"):
        solved(hooks={event: lambda search, nodes: 1 / 0})
    with pytest.raises(OptionError, match=f"hook {event} returned 5"):
        solved(hooks={event: lambda search, nodes: 5})


@pytest.mark.parametrize("fault", [RuntimeError("gone"), SystemExit(3), StopIteration(), MemoryError(), 5, ["text"]])
def test_a_failing_decoder_is_named(fault: Any) -> None:
    with pytest.raises(TotError, match=r"^decoder Counts (raised|returned)"):
        solved(decoder=Counts(fault))


# -- evaluations ------------------------------------------------------------------------------------------------


class Poison(Numbers):
    """`score` returns the object that the reference names."""

    def score(self, answer: Any, reference: Any) -> Any:
        if reference == "raises":
            raise KeyError("boom")
        return {"nan": math.nan, "text": "x", "none": None, "huge": 10**400}.get(reference, 0.5)


def test_a_score_that_is_not_a_number_fails_its_row_and_keeps_the_answer(tmp_path: Path) -> None:
    references = ["fine", "nan", "text", "none", "huge", "raises"]
    rows = "".join(json.dumps({"question": f"q{i}", "answer": each}) + "\n" for i, each in enumerate(references))
    (tmp_path / "q.jsonl").write_text(rows)
    options: dict[str, Any] = {"search": SEARCH, "evaluator": "heuristic", "decoder": Counts()}
    results = evaluate(Poison, tmp_path / "q.jsonl", out=tmp_path / "out", **options)
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert results.errors == 5
    assert [sample["score"] for sample in samples] == [0.5, 0, 0, 0, 0, 0]
    assert all(sample["answer"] for sample in samples)
    assert samples[1]["error"] == "TaskError: Poison.score gave nan: return a finite number"
    assert samples[5]["error"].startswith("TaskError: Poison.score raised KeyError: 'boom'")
