"""solve() and asolve(): a task, a question, a model and a search in; a Solution out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from tot.backends import Backend
from tot.decoders.budget import Budget, Meter
from tot.decoders.decoder import Decoder, load_decoder
from tot.decoders.errors import OptionError, unknown
from tot.decoders.request import Purpose, Usage
from tot.search import BFS, Search
from tot.search.problem import Problem, Watcher
from tot.task import Task, load_task
from tot.thoughts import Sample, ThoughtGenerator
from tot.tree import ThoughtTree
from tot.values import Likelihood, StateEvaluator, Value

EVALUATORS: dict[str, type[Value | Likelihood]] = {"likelihood": Likelihood, "value": Value}
"""The state evaluators by name."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Solution:
    """What a search came to."""

    answer: str | None
    """None where not even the best state holds one."""
    solved: bool
    """True only where the task itself verified the answer."""
    value: float | None
    """The best state's value on the task's scale."""
    tree: ThoughtTree
    usage: Usage
    calls: int
    """Samples asked of a decoder."""
    parse_failures: int
    stopped: str | None
    """Why the search ended early ("budget: tokens (512 of 500)", "interrupted"), or None."""

    def to_json(self) -> dict[str, Any]:
        """The run as it is saved: the result and the tree, with a format version."""
        return {
            "format": "tot.run",
            "version": 1,
            **self.summary(),
            "calls": self.calls,
            "parse_failures": self.parse_failures,
            "stopped": self.stopped,
            "tree": self.tree.to_json(),
        }

    def summary(self) -> dict[str, Any]:
        """Answer, solved, value and usage."""
        usage = {name: getattr(self.usage, name) for name in self.usage.__slots__}
        return {"answer": self.answer, "solved": self.solved, "value": self.value, "usage": usage}


def solve(
    task: Task | type[Task] | str,
    question: str,
    *,
    model: str | Path | Any = "smollm2-135m",
    decoder: str | Mapping[Purpose, str] | Decoder = "ar",
    search: Search | None = None,
    generator: ThoughtGenerator | None = None,
    evaluator: StateEvaluator | None = None,
    budget: Budget | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    problem_id: str | None = None,
    watch: Watcher | None = None,
    **model_options: Any,
) -> Solution:
    """Solve one question. Works in a script and inside a running event loop (Jupyter).

    `decoder` is a method's name, names by purpose ({"generate": ..., "evaluate": ..., "answer": ...}, on one engine),
    or a decoder object, which then has its own model. `max_tokens` caps every decoded text. `model_options` go to
    `load_decoder` (tokenizer, dtype, device, kv_budget, and the decoder's own). Ctrl-C ends the search with the best
    answer so far. Raises TotError for whatever the caller can put right.
    """
    return _run(
        asolve(
            task,
            question,
            model=model,
            decoder=decoder,
            search=search,
            generator=generator,
            evaluator=evaluator,
            budget=budget,
            max_tokens=max_tokens,
            seed=seed,
            problem_id=problem_id,
            watch=watch,
            keep_best=True,
            **model_options,
        )
    )


async def asolve(
    task: Task | type[Task] | str,
    question: str,
    *,
    model: str | Path | Any = "smollm2-135m",
    decoder: str | Mapping[Purpose, str] | Decoder = "ar",
    search: Search | None = None,
    generator: ThoughtGenerator | None = None,
    evaluator: StateEvaluator | None = None,
    budget: Budget | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    problem_id: str | None = None,
    watch: Watcher | None = None,
    keep_best: bool = False,
    **model_options: Any,
) -> Solution:
    """`solve` as a coroutine: many at once on one decoder object share its forward passes.

    Cancelling it raises CancelledError, or with `keep_best` ends it with the best answer so far.
    """
    task = load_task(task)
    task.start(question)  # a question that can't be asked is refused before a model is loaded
    with ExitStack() as stack:
        decoders = await asyncio.to_thread(_decoders, decoder, model, model_options, stack)
        problem = Problem(
            task,
            question,
            Backend(decoders),
            generator or Sample(),
            evaluator or Likelihood(),
            Meter(budget),
            seed,
            problem_id,
            max_tokens,
            watch,
        )
        answer = None
        try:
            await (search or BFS()).run(problem)
            if not problem.out_of_budget():
                answer = await problem.answer(problem.best)
                problem.out_of_budget()  # notes the limit that the answer itself may have reached
        except asyncio.CancelledError:
            if not keep_best:
                raise
            problem.stopped = "interrupted"
        return conclude(problem, answer)


def conclude(problem: Problem, answer: str | None = None) -> Solution:
    """The solution as things stand: without an answer of its own, what the best state's text says."""
    best = problem.best
    if answer is None and best.thought is not None:
        answer = problem.task.parse_answer(problem.tree.state(best).text)
    problem.tree.choose(best)
    meter = problem.meter
    return Solution(
        answer=answer,
        solved=answer is not None and problem.task.verify(problem.tree.state(problem.tree.root).question, answer),
        value=best.value,
        tree=problem.tree,
        usage=replace(meter.usage, forwards=meter.forwards, new_tokens=meter.new_tokens, seconds=meter.seconds),
        calls=problem.calls,
        parse_failures=problem.parse_failures,
        stopped=problem.stopped,
    )


def _decoders(
    decoder: str | Mapping[Purpose, str] | Decoder, model: Any, options: dict[str, Any], stack: ExitStack
) -> dict[Purpose, Decoder]:
    """A decoder for each purpose; those made here share one engine, which the stack closes."""
    purposes: tuple[Purpose, ...] = get_args(Purpose)
    if not isinstance(decoder, str | Mapping):
        if options:
            raise OptionError(f"{', '.join(options)}: a decoder object has its model already; leave these out")
        return dict.fromkeys(purposes, decoder)
    names = (
        dict.fromkeys(purposes, decoder) if isinstance(decoder, str) else {**dict.fromkeys(purposes, "ar"), **decoder}
    )
    for purpose in names:
        if purpose not in purposes:
            raise OptionError(unknown("purpose", str(purpose), purposes))
    first, *others = dict.fromkeys(names.values())
    made = {first: stack.enter_context(load_decoder(first, model, **options))}
    made |= {name: load_decoder(name, engine=made[first].engine) for name in others}
    return {purpose: made[name] for purpose, name in names.items()}


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end, in a thread of its own where this one has an event loop running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: Future[_T] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def work() -> None:
        try:
            result.set_result(loop.run_until_complete(task))
        except BaseException as error:  # handed to the caller's thread  # noqa: BLE001
            result.set_exception(error)
        finally:
            loop.close()

    threading.Thread(target=work, name="tot-solve", daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        return result.result()
