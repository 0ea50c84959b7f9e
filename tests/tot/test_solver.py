"""solve() and asolve(): scripts, event loops, concurrent searches on one decoder, interrupts, and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tot import BFS, Budget, EngineOptions, Model, SearchConfig, Solution, Value, asolve, solve
from tot.api import run_search
from tot.decoders import ModelError, OptionError, RequestError, TaskError

SMALL = BFS(thoughts=2, breadth=2, depth=3)
QUESTIONS = ["one", "two", "what is two and three?", "a", "the same", "the same"]  # language: ok
ONE_LEVEL = {"grow": ["a", "b"], "value a": "3", "value b": "7", "answer b": "the end"}


def shape(solution: Solution) -> list[tuple[str, int | None]]:
    """Return every thought, in order, with its parent."""
    return [(node.thought.text if node.thought else "", node.parent) for node in solution.tree]


def values(solution: Solution) -> list[float]:
    return [node.value for node in solution.tree if node.value is not None]


# -- results ----------------------------------------------------------------------------------------------------


def test_solve_returns_the_result_of_the_search(letters: Any, scripted: Any) -> None:
    decoder = scripted(ONE_LEVEL)
    solution = solve(letters, "q", decoder=decoder, search=BFS(thoughts=2, depth=2), evaluator=Value())
    assert (solution.answer, solution.value, solution.solved, solution.stopped) == ("the end", 7, False, None)
    assert (solution.calls, solution.parse_failures, len(solution.tree)) == (5, 0, 3)
    assert solution.usage.new_tokens == 25
    assert 0 < solution.usage.seconds < 60


def test_a_solution_as_json_has_its_summary_and_its_tree(letters: Any, scripted: Any) -> None:
    solution = solve(letters, "q", decoder=scripted(ONE_LEVEL), search=BFS(thoughts=2, depth=2), evaluator=Value())
    run = solution.to_json()
    assert list(solution.summary()) == ["answer", "certainty", "gain", "solved", "value", "usage"]
    assert solution.summary().items() <= run.items()
    assert (run["format"], run["version"], run["calls"], run["parse_failures"]) == ("tot.run", 2, 5, 0)
    assert run["tree"] == solution.tree.to_json()
    usage = ["prompt_tokens", "reused_prompt_tokens", "new_tokens", "forwards", "drafted", "accepted", "seconds"]
    usage += ["approximate_tokens", "undecoded_tokens", "reached", "forced_tokens", "masked_tokens"]
    assert list(run["usage"]) == usage


def test_solved_means_that_the_task_verified_the_answer(letters: Any, scripted: Any) -> None:
    strict = type(
        "Strict", (letters,), {"verify": lambda self, question, answer: (question, answer) == ("q", "the end")}
    )
    search = BFS(thoughts=2, depth=2)
    assert solve(strict, "q", decoder=scripted(ONE_LEVEL), search=search, evaluator=Value()).solved
    wrong = scripted(ONE_LEVEL | {"answer b": "an end"})
    assert not solve(strict, "q", decoder=wrong, search=search, evaluator=Value()).solved


def test_text_before_the_continued_line_is_not_an_answer(scripted: Any) -> None:
    """GSM8K numbers its steps: if a reply has no number, the number of a step must not become the answer."""

    class Clueless(scripted):  # type: ignore[misc]
        def _reply(self, request: Any, sample: int) -> Any:
            return self.completion("no idea?")

    solution = solve("gsm8k", "q", decoder=Clueless({}), search=BFS(thoughts=1, depth=2), evaluator=Value())
    assert (solution.answer, len(solution.tree)) == (None, 2)


# -- event loops and concurrency --------------------------------------------------------------------------------


def test_solve_works_inside_a_running_event_loop(letters: Any, scripted: Any) -> None:
    async def cell() -> tuple[Solution, bool]:
        loop = asyncio.get_running_loop()
        solution = solve(letters, "q", decoder=scripted(ONE_LEVEL), search=BFS(thoughts=2, depth=2), evaluator=Value())
        return solution, asyncio.get_running_loop() is loop

    solution, undisturbed = asyncio.run(cell())
    assert solution.answer == "the end"
    assert undisturbed


def test_concurrent_searches_on_one_decoder_equal_sequential_ones(letters: Any, tiny: Any) -> None:
    task = type("Asked", (letters,), {"templates": {k: "{{ question }} " + v for k, v in letters.templates.items()}})
    options: dict[str, Any] = {"search": SMALL, "max_tokens": 6, "seed": 5}
    with tiny() as decoder:
        alone = [solve(task, question, decoder=decoder, **options) for question in QUESTIONS]
        alone_forwards = decoder.engine.forwards

    async def all_at_once(decoder: Any) -> list[Solution]:
        return await asyncio.gather(*(asolve(task, question, decoder=decoder, **options) for question in QUESTIONS))

    with tiny() as decoder:
        together = asyncio.run(all_at_once(decoder))
        assert decoder.engine.forwards < alone_forwards / 2  # the searches shared forward passes
        assert decoder.engine.cache.live == 0
    for one, other in zip(alone, together, strict=True):
        assert shape(one) == shape(other)
        assert one.answer == other.answer
        assert values(one) == pytest.approx(values(other), rel=1e-4)
        assert one.usage.new_tokens == other.usage.new_tokens
    assert len({str(shape(solution)) for solution in alone}) == len(set(QUESTIONS))
    assert shape(alone[-1]) == shape(alone[-2])  # the same question: the same seeds


def test_a_cancelled_search_cancels_its_requests(letters: Any, tiny: Any) -> None:
    async def run(decoder: Any) -> int:
        progress: list[Any] = []
        config = SearchConfig.of(None, {"decoder": decoder, "search": BFS(thoughts=3, depth=9), "max_tokens": 60})
        search = asyncio.create_task(run_search(letters, "q", config, watch=progress.append))
        while not search.done() and not (progress and progress[0].search.best.depth >= 1 and decoder.engine.cache.live):
            await asyncio.sleep(0.001)
        search.cancel()  # in a later level: three requests, three samples each
        with pytest.raises(asyncio.CancelledError):
            await search
        before = decoder.engine.forwards
        while decoder.engine.cache.live:
            await asyncio.sleep(0.001)
        return decoder.engine.forwards - before

    with tiny() as decoder:
        assert asyncio.run(run(decoder)) <= 2
        after = solve(letters, "q", decoder=decoder, search=BFS(thoughts=1, depth=2), max_tokens=2)
    assert len(after.tree) == 2


def test_a_cancelled_search_can_keep_the_best_so_far(letters: Any, tiny: Any) -> None:
    async def run(decoder: Any) -> Solution:
        progress: list[Any] = []
        config = SearchConfig.of(None, {"decoder": decoder, "search": BFS(thoughts=2, depth=50), "max_tokens": 6})
        search = asyncio.create_task(run_search(letters, "q", config, watch=progress.append, keep_best=True))
        while not search.done() and (not progress or progress[0].search.best.depth < 2):
            await asyncio.sleep(0.001)
        search.cancel()
        return await search

    with tiny() as decoder:
        solution = asyncio.run(run(decoder))
    assert solution.stopped == "interrupted"
    assert 2 <= [node.depth for node in solution.tree if node.chosen][-1] < 49
    assert solution.answer == [solution.tree.state(node).text for node in solution.tree if node.chosen][-1]


# -- models, budgets and usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["forwards", "tokens"])
def test_a_local_decoder_stops_within_a_text_when_a_budget_is_spent(letters: Any, tiny: Any, limit: str) -> None:
    with tiny() as decoder:
        budget = Budget(**{limit: 12})
        solution = solve(letters, "q", decoder=decoder, search=BFS(thoughts=2, depth=9), max_tokens=6, budget=budget)
        assert decoder.engine.cache.live == 0
    assert solution.stopped is not None
    spent = {"forwards": solution.usage.forwards, "tokens": solution.usage.new_tokens}[limit]
    assert solution.stopped == f"budget: {limit} ({spent} of 12)"
    assert 12 <= spent < 12 + 2 * 2  # at most one step of all branches over the budget
    assert max(node.depth for node in solution.tree) < 8


# -- interrupts -------------------------------------------------------------------------------------------------

INTERRUPTED = """
import asyncio, os, signal, sys, time
from tot import BFS, SearchConfig, Task, Value
from tot.api import run_search
from tot.decoders import Completion, Usage
from tot.running import run_to_end

class Letters(Task):
    templates = {"thought": "grow {{ thoughts | length }}", "value": "value", "answer": "answer"}

class Interrupting:
    "Sends this process a Ctrl-C while it decodes the second level."
    def generate(self, requests):
        if requests[0].prompt[-1].content == "grow 1":
            os.kill(os.getpid(), signal.SIGINT)
            while not any(task.cancelling() for task in tasks):
                time.sleep(0.01)
        return [Completion("5", (), 0.0, "eos", Usage(new_tokens=1)) for r in requests for _ in range(r.sampling.n)]

tasks = set()

def watch(event):
    tasks.update(asyncio.all_tasks())

def run():
    tasks.clear()
    search = BFS(thoughts=2, depth=9)
    config = SearchConfig.of(None, {"decoder": Interrupting(), "search": search, "evaluator": Value()})
    solution = run_to_end(run_search(Letters, "q", config, watch=watch, keep_best=True))
    print(solution.stopped, solution.answer, solution.value, len(solution.tree))

async def cell():
    run()

run()
asyncio.new_event_loop().run_until_complete(cell())  # as a notebook's kernel does: no signal handler of asyncio's own
try:
    while True:
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("and Ctrl-C is Ctrl-C again")
"""


def test_ctrl_c_ends_the_search_with_the_best_so_far_in_a_script_and_in_a_notebook(python: Any) -> None:
    process = python("-c", INTERRUPTED)
    out, err = process.communicate(timeout=60)
    assert err == ""
    assert out.splitlines() == ["interrupted 5 5.0 2", "interrupted 5 5.0 2", "and Ctrl-C is Ctrl-C again"]
    assert process.returncode == 0


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_rejected_before_a_model_is_loaded(letters: Any, question: str) -> None:
    with pytest.raises(TaskError, match="the question is empty: give some text"):
        solve(letters, question, model="no such model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "gsm9k"}, r"unknown task 'gsm9k' \(did you mean gsm8k\?\): choose one of .*gsm8k"),
        ({"decoder": "beam"}, r"unknown decoder 'beam'.*: choose one of .*\bar\b"),
        ({"decoder": {"judge": "ar"}}, "unknown purpose 'judge': choose one of answer, escalate, evaluate, generate"),
        ({"decoder": {"generate": "beam"}}, r"unknown decoder 'beam'.*: choose one of .*\bar\b"),
        ({"model": Model(decoder="ar", options={"warmth": 3})}, r"decoder ar, option warmth: .* \(its options: none\)"),
        ({"dtype": "int3"}, r"unknown dtype 'int3': choose one of auto, bf16, fp32"),
        ({"model": Model(engine=EngineOptions(device="tpu"))}, "device 'tpu' is not known: choose auto, cpu, "),
    ],
)
def test_an_unknown_name_is_rejected_with_the_choices(letters: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        solve(**{"task": letters, "question": "q"} | options)


def test_an_unknown_model_is_rejected_with_the_known_ones(letters: Any) -> None:
    with pytest.raises(ModelError, match=r"unknown model 'smollm2' \(did you mean smollm2-135m\?\)"):
        solve(letters, "q", model="smollm2")


def test_a_prompt_longer_than_the_context_is_rejected_with_the_numbers(letters: Any, tiny: Any) -> None:
    task = type("Asked", (letters,), {"templates": letters.templates | {"thought": "{{ question }}"}})
    with tiny() as decoder, pytest.raises(RequestError, match=r"the model's context holds 512, .*: shorten the prompt"):
        solve(task, "long " * 200, decoder=decoder)


def test_a_cache_too_small_for_one_request_is_rejected_with_the_numbers(letters: Any, tiny: Any) -> None:
    with tiny(kv_budget=20) as decoder, pytest.raises(RequestError, match="the budget holds 20: raise kv_budget"):
        solve(letters, "q", decoder=decoder)
