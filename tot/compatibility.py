"""Reject combinations of search, generator and evaluator that cannot work on a task, before a model is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tot.decoders.errors import OptionError
from tot.evaluators.base import TemplateEvaluator
from tot.evaluators.combine import Combine
from tot.evaluators.heuristic import Confidence, Heuristic, Measured
from tot.evaluators.likelihood import Explain
from tot.evaluators.reliability import warn_if_noisy
from tot.generators.continuation import Continue
from tot.generators.enumerate import Enumerate
from tot.generators.propose import Propose
from tot.generators.sample import Sample
from tot.llm.family import family_of
from tot.search.ab_mcts import ABMCTS
from tot.search.base import Search
from tot.search.baselines import Act, WholeSolutions
from tot.search.best_first import BestFirst
from tot.search.bfs import BFS
from tot.search.dfs import DFS
from tot.search.mcts import MCTS
from tot.search.refine import Refine
from tot.search.self_consistency import SelfConsistency
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasActions, HasAnswer, HasHeuristic, HasMeasured
from tot.tree.thought import State

if TYPE_CHECKING:
    from tot.decoders.models.loaded import LoadedModel


def check_parts(task: Task, search: Any, generator: Any, evaluator: Any, *, own: Any) -> None:
    """Reject parts that cannot work together. User-defined parts are not checked.

    Args:
        own: The task's own evaluator, whose template may be missing: a search may end before it evaluates.

    Raises:
        OptionError: Parts cannot work together; the message names an alternative.
        TaskError: The task lacks a method or a template that a part needs.
    """
    if not isinstance(search, Search):
        return
    _check_search(task, search)
    grows = isinstance(search, ABMCTS | Act | BestFirst | BFS | DFS | MCTS | Refine)
    if grows:
        _check_generator(task, generator)
    if _evaluates(task, search):
        for one in filter(None, (evaluator, search.fast_evaluator)):
            if not (isinstance(one, TemplateEvaluator) and one == own):
                _check_evaluator(task, search, generator, one)
    if grows and not isinstance(generator, Continue) and not isinstance(task, HasAnswer):
        task.require(task.answer)


def check_escalation(search: Any, generator: Any, **_: Any) -> None:
    """Reject a second model that the built-in search and generator never ask. User-defined parts are not checked."""
    built_in = all(type(part).__module__.startswith("tot.") for part in (search, generator))
    asks = isinstance(search, ABMCTS) or (isinstance(search, SelfConsistency) and search.until is not None)
    if built_in and not asks:
        raise OptionError(
            f"escalate has no effect: {type(search).__name__} asks only one model; choose "
            "search='self-consistency:samples=8,until=0.95' or search='ab-mcts', or leave escalate out"
        )


def warn_of_noise(task: Task, search: Any, evaluator: Any, model: LoadedModel | None) -> None:
    """Warn if a search drops states by an evaluator that the shipped table calls too noisy for the task and model."""
    if _prunes(task, search):
        warn_if_noisy(task, evaluator, family_of(model))


def _prunes(task: Task, search: Any) -> bool:
    """Return whether the values of unfinished states decide which of them are expanded."""
    if isinstance(search, BFS):
        return search.select != "all" and search.thoughts != 1
    return isinstance(search, ABMCTS | BestFirst | DFS | MCTS) and _evaluates(task, search)


def _evaluates(task: Task, search: Search) -> bool:
    if isinstance(search, BestFirst):
        return search.rank == "value" or (search.rank == "auto" and not isinstance(task, HasHeuristic))
    if isinstance(search, WholeSolutions):
        return search.weighted
    return isinstance(search, ABMCTS | BFS | DFS | MCTS | Refine)


def _check_search(task: Task, search: Search) -> None:
    if isinstance(search, BestFirst) and search.rank == "cost" and not isinstance(task, HasHeuristic):
        raise OptionError(
            f"best-first:rank=cost needs the task's `heuristic`, which {type(task).__name__} does not define: define "
            "it, or choose search='best-first:rank=value'"
        )
    if not search.whole:
        return
    if solutions := getattr(search, "solutions", ()):
        task.require(*solutions)
    elif isinstance(task, HasActions):
        task.require(task.chain)
    elif not task.has_template(task.chain):  # a solution is one thought, and then the answer
        task.require(*task.thought)


def _check_generator(task: Task, generator: Any) -> None:
    first, *others = task.thought
    if isinstance(generator, Continue):
        if others:
            chat = "prompts='chat', or " if len(task.chat.get("thought", task.thought)) == 1 else ""
            raise OptionError(
                f"{type(generator).__name__} writes one message, but a thought of {type(task).__name__} has "
                f"{len(task.thought)} templates ({', '.join(task.thought)}): choose {chat}generator='sample'"
            )
        task.require(first)
    elif isinstance(generator, Enumerate):
        if not isinstance(task, HasActions):
            CheckedTask(task).actions(State(question=""))  # raises
        task.require(*([first] if generator.prior == "model" else []), *others)
    elif isinstance(generator, Propose):
        task.require(task.propose, *task.thought)
    elif isinstance(generator, Sample):
        task.require(*task.thought)


def _check_evaluator(task: Task, search: Search, generator: Any, evaluator: Any) -> None:
    if isinstance(evaluator, Combine):
        for one in evaluator.evaluators:
            _check_evaluator(task, search, generator, one)
    elif isinstance(evaluator, Heuristic) and not isinstance(task, HasHeuristic):
        CheckedTask(task).heuristic(State(question=""))  # raises
    elif isinstance(evaluator, Measured) and not isinstance(task, HasMeasured):
        CheckedTask(task).measured(State(question=""))  # raises
    elif isinstance(evaluator, Confidence):
        if search.whole:
            raise OptionError(
                f"whole solutions of {type(search).__name__} have no confidence: choose another evaluator, such as "
                "evaluator='vote'"
            )
        single = isinstance(generator, Sample) and generator.samples == 1
        if single or isinstance(generator, Continue | Enumerate | Propose):
            raise OptionError(
                "the thought generator returns no confidence: use Sample(samples=8) (generator='sample:samples=8')"
            )
    elif isinstance(evaluator, TemplateEvaluator):
        template = evaluator.asked(task)
        task.require(template)
        if isinstance(evaluator, Explain) and task.has_default(template):
            task.require(task.value)  # the default template includes it
