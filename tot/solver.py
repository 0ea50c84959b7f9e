"""solve() and asolve(): solve one question of a task with a model and a search."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from tot.config import SearchConfig
from tot.decoders.budget import Meter
from tot.decoders.request import Usage
from tot.evaluators.reliability import warn_if_noisy
from tot.llm.backend import Backend
from tot.running import run_to_end
from tot.search.certainty import curve_for, curves_for, features
from tot.search.checkpoint import Checkpoint
from tot.search.session import SearchSession, Watcher
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasMeasured
from tot.tree.saved import RUN
from tot.tree.tree import ThoughtTree

if TYPE_CHECKING:
    from tot.search.options import SearchOptions


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a search."""

    answer: Any | None
    """Text, or a list of actions for a planning task. None if the best state has no answer."""
    solved: bool
    """Whether the task verified the answer."""
    value: float | None
    """The best state's value on the task's scale."""
    tree: ThoughtTree = field(repr=False)
    usage: Usage
    calls: int
    """Number of samples requested from decoders."""
    parse_failures: int
    """Number of replies that could not be parsed."""
    rejected: int
    """Number of thoughts that were not legal, or returned to an earlier state of their path."""
    stopped: str | None
    """Why the search ended early or without a goal ("no goal among 40 thoughts", "interrupted", "budget: tokens (512 of
    500)"), or None."""
    filters: Mapping[str, float] = field(default_factory=dict)
    """The sampling filters: top_k, top_p, min_p."""
    verdict: str = "verified"
    """The task's word for a solved answer."""
    votes: tuple[int, int] | None = None
    """How many leaves voted for the answer, and how many voted; None if there was no vote."""
    certainty: float | None = None
    """Probability that the answer is right: 1 if the task verified it, otherwise calibrated from the votes. None means
    not known, as after a single sample."""
    measured: float | None = None
    """The score of the best state, negated if lower scores are better; None if the task measures no scores."""
    by_model: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Calls, prompt tokens and new tokens by model; empty if there is only one."""

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON data: the result and the tree, with a format version."""
        return {**RUN, **self.result(), "tree": self.tree.to_json()}

    def result(self) -> dict[str, Any]:
        """Return the run as JSON data without its tree."""
        return {
            **self.summary(),
            "calls": self.calls,
            "parse_failures": self.parse_failures,
            "rejected": self.rejected,
            "stopped": self.stopped,
            "verdict": self.verdict,
            "votes": self.votes,
            "filters": dict(self.filters),
        }

    def summary(self) -> dict[str, Any]:
        """Return answer, certainty, solved, value and usage; with several models also usage by model."""
        about = {name: getattr(self, name) for name in ("answer", "certainty", "solved", "value")}
        return about | {"usage": asdict(self.usage)} | ({"by_model": self.by_model} if self.by_model else {})


def solve(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    *,
    hooks: object | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Watcher | None = None,
    **options: Unpack[SearchOptions],
) -> Solution:
    """Solve one question. Works in a script and inside a running event loop (Jupyter).

    Ctrl-C ends the search with the best answer so far.

    Args:
        task: A task, its class, its name, or "path/to/file.py:ClassName".
        question: The question, as text.
        config: The options of the run.
        hooks: Functions that watch and steer the search (see `tot.search.hooks`).
        checkpoint: Records every step, and resumes a killed run.
        watch: Called with the session at the start and after every step.
        options: Fields of `SearchConfig`, which override `config` (model, decoder, search, budget, max_tokens, seed…).
            Other names are options of the decoder.

    Raises:
        TotError: An error that the caller can fix.
    """
    arguments: dict[str, Any] = {"hooks": hooks, "checkpoint": checkpoint, "watch": watch}
    return run_to_end(asolve(task, question, config, **arguments, keep_best=True, **options))


async def asolve(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    *,
    hooks: object | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Watcher | None = None,
    keep_best: bool = False,
    **options: Unpack[SearchOptions],
) -> Solution:
    """Solve one question, as a coroutine. Concurrent calls with one decoder object share its forward passes.

    Cancelling it raises CancelledError; with `keep_best`, it returns the best answer so far instead.
    """
    config = SearchConfig.of(config, options).exact()
    task = config.suited(task)
    parts, filters = config.parts(task), config.filters_for(task)
    CheckedTask(task).start(question)  # reject an invalid question before a model is loaded
    curves_for(task, config.certainty)
    with ExitStack() as stack:
        decoders = await config.aopen(stack)
        session = SearchSession(
            task,
            question,
            Backend(decoders, Meter(config.budget), filters),
            **parts,
            seed=config.seed,
            max_tokens=config.max_tokens,
            filters=filters["generate"],
            watch=watch,
            hooks=hooks,
            checkpoint=checkpoint,
            reproducible=config.reproducible,
            curve=curve_for(task, parts["search"], decoders, config.certainty),
        )
        warn_if_noisy(task, parts["search"], parts["evaluator"], session.context.to("evaluate").loaded)
        answer = None
        try:
            await session.run()
            answer = await session.answer()
        except asyncio.CancelledError:
            if not keep_best:
                raise
            session.stopped = "interrupted"
        return conclude(session, answer)


def conclude(session: SearchSession, answer: Any | None = None) -> Solution:
    """Return the solution of a session, with its certainty if the session has a curve.

    If no answer is given, parse the best state's text.
    """
    search, task, tree = session.search, session.task, session.tree
    if answer is None:
        answer = search.answer_at(search.best)
    in_text = search.best.thought is not None and not search.checked.came_of(search.best.thought)
    if answer is None and in_text and session.asks:
        truncated = session.truncated or bool(search.best.thought and search.best.thought.truncated)
        answer = search.checked.answer_in(tree.state(search.best).text, truncated)
    tree.choose(search.best)
    stopped = session.stopped or search.stopped
    if answer is None and stopped is None:
        stopped = session.truncation()
    nodes = list(tree)
    solved = answer is not None and (search.best.verified or search.verify(answer))
    return Solution(
        answer=answer,
        solved=solved,
        value=search.best.value,
        tree=tree,
        usage=session.meter.total,
        calls=session.calls,
        parse_failures=sum(node.parse_failures for node in nodes),
        rejected=sum(node.rejected for node in nodes),
        stopped=stopped,
        filters=session.context.filters,
        verdict=task.verdict,
        votes=session.votes,
        certainty=_certainty(session, solved),
        measured=search.checked.measured(tree.state(search.best)) if isinstance(task, HasMeasured) else None,
        by_model=session.by_model,
    )


def _certainty(session: SearchSession, solved: bool) -> float | None:
    """Return the probability that a session's answer is right; None after a single sample or without a vote."""
    if solved and session.task.verdict == Task.verdict:  # another verdict is about a part, such as the examples
        return 1.0
    if session.curve is None or session.votes is None:
        return None
    return session.curve.certainty(features(session.ballots))
