"""Run: one search with a model. It executes the steps of a search in a budget, records them, and answers.

The SearchState owns the tree and yields steps. The run holds the model, the generator, the evaluator and the budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tot.answers import Answers
from tot.config import SearchConfig
from tot.decoders.budget import Meter
from tot.decoders.decoder import Decoder
from tot.decoders.errors import TaskError
from tot.decoders.request import Purpose, Usage
from tot.evaluators.base import Evaluator, judge, remember
from tot.generators.sample import Sample, distinct_solutions, whole_solutions
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.llm.replies import Proposal, as_proposals
from tot.registry import options_to_json
from tot.sandbox import can_confine
from tot.search.auto import Auto
from tot.search.base import WRITERS, Resources, SearchState
from tot.search.calibration import calibration_of
from tot.search.checkpoint import Checkpoint, Recorded
from tot.search.steps import Evaluate, Expand, Step
from tot.solution import Solution
from tot.task.checked import CheckedTask, user_code
from tot.task.task import Task
from tot.task.world import HasMeasured
from tot.tree.thought import State
from tot.tree.tree import Node, ThoughtTree

Watcher = Callable[["Run"], None]
_GRACE = 2.0
"""Seconds after the limit on seconds in which running texts and actions may end."""


class Run:
    """One search with a model. `solve` grows the tree and returns the solution."""

    def __init__(
        self,
        task: Task,
        question: str,
        config: SearchConfig,
        decoders: Mapping[Purpose, Decoder],
        parts: Mapping[str, Any],
        filters: Mapping[Purpose, Mapping[str, float]],
        *,
        seed: int | None = None,
        hooks: object | None = None,
        checkpoint: Checkpoint | None = None,
        watch: Watcher | None = None,
    ) -> None:
        """Start the search, with parts and filters from `SearchConfig.parts` and `SearchConfig.filters_for`.

        `watch` is called with the run at the start and after every step. Other arguments are as for `asolve`.
        """
        search, self._generator, self._evaluator = (parts[kind] for kind in ("search", "generator", "evaluator"))
        self.task = task
        self.meter = Meter(config.budget)
        self.backend = Backend(decoders, self.meter, filters)
        self.stopped: str | None = None
        """Why the run ended early, if it did."""
        self._max_tokens = config.max_tokens
        self._how = {
            "thinking": config.thinking.model_dump(mode="json", exclude_defaults=True) or None,
            "template_options": dict(config.template_options) or None,
        }
        self._checkpoint = checkpoint
        self._watch = watch or (lambda run: None)
        self._counted = 0, self.meter.total
        """Calls and usage at the last results."""
        self._running: dict[Step | None, asyncio.Task[Any]] = {}
        """Tasks by step; None is the request for answers."""
        self._dropped: list[asyncio.Task[Any]] = []
        """Cancelled tasks of branches that the search has dropped."""
        self._halted = False
        seed = config.seed if seed is None else seed
        root = CheckedTask(task).start(question)
        ordered = search.merges(root) or getattr(self._evaluator, "compares", False)
        self._by_level = config.reproducible or ordered
        """Whether branches wait for each other: merging and comparing states depends on the order of results."""
        given: tuple[str, ...] = getattr(search, "solutions", ())
        if len(set(given)) > 1 and not can_confine():
            given = tuple(template for template in given if template not in CheckedTask(task).programs)
        self._solutions = given
        """The templates of whole solutions, in turn, without programs that can't run; empty for the task's default."""
        resources = self._resources(search, root, independent=not ordered, timed=not config.reproducible)
        found = {one: calibration_of(task, decoders.get(one), config.calibration) for one in WRITERS if one in decoders}
        resources = replace(resources, calibrations={name: one for name, one in found.items() if one is not None})
        self.search: SearchState = search.start(task, root, seed=seed, hooks=hooks, resources=resources)
        """The running search, which yields the steps."""
        self.context = Context(
            self.search.checked,
            self.tree,
            self.backend,
            seed=seed,
            max_tokens=config.max_tokens,
            thinking=config.thinking,
            template_options=config.template_options,
        )
        self.answers = Answers(self.search, self.context.to("answer"))
        self._evaluating = self.context.to("evaluate")
        if checkpoint is not None:
            self._begin(checkpoint, search, seed, resources)
        self._watch(self)

    def _resources(self, search: Any, root: State, independent: bool, timed: bool) -> Resources:
        """Return the resources of the search; of a resumed run, as at its start. Measured times differ between runs."""
        checked, checkpoint = CheckedTask(self.task), self._checkpoint
        own = Resources(
            escalates=self.backend.can("escalate"),
            budgeted=any(limit is not None for _, limit in self.meter.budget),
            distinct=distinct_solutions(checked, root, self._generator, self._solutions) if search.whole else None,
            # A subclass may override `propose`, and evaluators that compare need all thoughts.
            independent=independent and type(self._generator) is Sample,
        )
        if self.meter.budget.tokens is not None:  # cancelled samples would spend it
            own = replace(own, cheap_samples=1)
        elif timed:
            own = replace(own, cheap_samples=self.backend.cheap_samples)
        if checkpoint is None:
            return own
        names = ("cheap_samples", "budgeted")
        return replace(own, **{name: checkpoint.setting(name, getattr(own, name)) for name in names})

    def _begin(self, checkpoint: Checkpoint, search: Any, seed: int, resources: Resources) -> None:
        """Record the options of the steps, or compare them with the resumed run."""
        parts = {"search": search, "generator": self._generator, "evaluator": self._evaluator}
        about: dict[str, Any] = {name: options_to_json(part) for name, part in parts.items()}
        about |= {"seed": seed, "max_tokens": self._max_tokens, "filters": self.context.filters or None}
        about |= {"cheap_samples": resources.cheap_samples, "budgeted": resources.budgeted or None}
        about |= {name: value for name, value in self._how.items() if value}
        about |= {"task": type(self.task).__name__, "models": self.backend.fingerprints}
        if isinstance(search, Auto):  # its steps depend on them
            about |= {"calibrations": {name: one.checksum for name, one in resources.calibrations.items()}}
        about |= {"prompts": "chat"} if self.task.prompts.kind == "chat" else {}
        about |= {"version": self.search.checked.version} if self.search.checked.version else {}
        checkpoint.begin(self.tree.state(self.tree.root), about)

    @property
    def tree(self) -> ThoughtTree:
        return self.search.tree

    async def solve(self, keep_best: bool = False) -> Solution:
        """Execute the steps of the search until it ends or a budget is spent, then answer.

        Cancelling it raises CancelledError; with `keep_best`, it returns the best answer so far instead.
        """
        answer = None
        try:
            await self._grow()
            answer = await self._answer()
        except asyncio.CancelledError:
            if not keep_best:
                raise
            self.stopped = "interrupted"
        return self.solution(answer)

    def stop(self, why: str) -> None:
        """End the run with the best answer so far, without further calls. Call it in the event loop of `solve`."""
        self.stopped, self._halted = why, True
        for task in self._running.values():
            task.cancel()

    def solution(self, answer: Any | None = None) -> Solution:
        """Return the solution so far. If no answer is given, parse the best state's text."""
        search, task, tree = self.search, self.task, self.tree
        answer = self.answers.of_best() if answer is None else answer
        tree.choose(search.best)
        stopped = self.stopped or search.stopped
        if answer is None and stopped is None:
            stopped = self.answers.truncation(self._max_tokens, self.backend)
        nodes = list(tree)
        solved = answer is not None and (search.best.verified or search.verify(answer))
        certainty = self.answers.certainty(solved)
        return Solution(
            answer=answer,
            solved=solved,
            value=search.best.value,
            tree=tree,
            usage=self.meter.total,
            calls=self.backend.calls,
            parse_failures=sum(node.parse_failures for node in nodes),
            rejected=sum(node.rejected for node in nodes),
            stopped=stopped,
            filters=self.context.filters,
            verdict=task.verdict,
            votes=self.answers.votes,
            certainty=certainty,
            gain=self.answers.gain(certainty),
            measured=search.checked.measured(tree.state(search.best)) if isinstance(task, HasMeasured) else None,
            by_model=self.backend.by_model,
        )

    async def _grow(self) -> None:
        """Execute the steps of the search until it ends or a budget is spent."""
        try:
            while not self._halted and (steps := self._resume()):
                self._start(steps)
                if not self._running:
                    return
                when = asyncio.ALL_COMPLETED if self._by_level else asyncio.FIRST_COMPLETED
                await asyncio.wait(self._running.values(), timeout=self._patience, return_when=when)
                if self._halted:
                    return
                self._take(steps)
                if self._patience == 0:  # a decoder, an action or an evaluator does not end
                    self.stopped = f"budget: {self.meter.overspent()}"
                    return
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), *self._dropped, return_exceptions=True)
            self._running.clear()
            await self.backend.cancel()

    @property
    def _patience(self) -> float | None:
        """Seconds until the running work is abandoned: shortly after the limit on seconds. None without a limit."""
        budget = self.meter.budget.seconds
        return None if budget is None else max(0.0, budget + _GRACE - self.meter.seconds)

    def _resume(self) -> list[Step]:
        """Tell the search the recorded results. Return the pending steps, whose results are not recorded."""
        while (steps := self.search.pending()) and self._checkpoint is not None:
            if not (recorded := self._checkpoint.next_round(steps)):
                break
            for step, one in recorded.items():
                self._replay(one)
                if isinstance(step, Evaluate):
                    remember(self._evaluating, self._evaluator_of(step), step.nodes, one.results)
            self._tell({step: one.results for step, one in recorded.items()}, recorded=True)
        return steps

    def _start(self, steps: Sequence[Step]) -> None:
        """Start the pending steps that do not run yet and that the budget allows. Cancel the ones of other branches."""
        for step in self._running.keys() - set(steps):
            self._dropped.append(task := self._running.pop(step))
            task.cancel()
        for step in steps:
            if step in self._running:
                continue
            limit = self.meter.exhausted() if isinstance(step, Expand) else self.meter.overspent()
            if limit is None:
                self._running[step] = asyncio.create_task(self._results(step))
            else:
                self.stopped = f"budget: {limit}"

    def _take(self, steps: Sequence[Step]) -> None:
        """Tell the search the results of the steps that have ended. Raises the error of the first that has failed."""
        ended: dict[Step, list[Any]] = {}
        try:
            for step in steps:
                if step in self._running and self._running[step].done():
                    ended[step] = self._running.pop(step).result()
        finally:
            if ended:
                self._tell(ended)

    def _tell(self, ended: Mapping[Step, list[Any]], recorded: bool = False) -> None:
        """Tell the search the results of steps that ended together, and record them unless they come from a record."""
        calls, total = self._counted
        self._counted = self.backend.calls, self.meter.total
        thoughts = 0
        try:
            for step, results in ended.items():
                nodes = len(self.tree)
                self.search.tell(results, executed=True, step=step)
                # An expansion without a new thought counts as one, so that refused thoughts spend a budget of thoughts.
                thoughts += max(len(self.tree) - nodes, int(isinstance(step, Expand)))
            nodes = len(self.tree)
            self.search.pending()  # run the search up to its next steps: changes to the tree belong to these ones
            thoughts += len(self.tree) - nodes
        finally:  # record the results even if the task fails on them
            self.meter.count(nodes=thoughts)
            # Don't record a step that the budget may have cut short: a resumed run with a larger budget repeats it.
            if not recorded and self._checkpoint is not None and self.meter.overspent() is None:
                first = next(iter(ended))
                records: dict[Step | None, Recorded] = {
                    step: self._record(results, calls, total) if step is first else Recorded(results)
                    for step, results in ended.items()
                }
                self._checkpoint.write(records, self.tree)
        self._watch(self)

    def _record(self, results: list[Any], calls: int, total: Usage) -> Recorded:
        """Return the record of steps that began with these counts of calls and usage."""
        return Recorded(results, self.backend.calls - calls, self.meter.total - total, {}, self.backend.by_purpose)

    def _replay(self, recorded: Recorded) -> None:
        """Count the calls and the usage of recorded results."""
        self.backend.replay(recorded.calls, recorded.by_purpose)
        self.meter.replay(recorded.spent)
        self.tree.add_calls(recorded.calls_by_node)

    async def _results(self, step: Step) -> list[Any]:
        if isinstance(step, Evaluate):
            return await judge(self._evaluating, self._evaluator_of(step), step.nodes)
        proposals = await self._proposals(step)
        await self.search.execute(step.nodes, step.states, proposals)
        return proposals

    async def _proposals(self, step: Expand) -> list[list[Proposal]]:
        context, generator = self.context.to(step.purpose, step.turn), self._generator
        count, sample = step.count or 1, step.sample
        if step.whole:
            greedy = self.search.options.greedy_draft
            about = count, generator, self._solutions, greedy, sample
            return await context.each(step.nodes, lambda node: whole_solutions(context, node, *about))
        if sample is not None:
            assert isinstance(generator, Sample)  # Resources.independent
            return await context.each(step.nodes, lambda node: generator.sample(context, node, sample, count))
        method = f"{type(generator).__name__}.propose"
        with user_code(method):
            thoughts = list(await generator.propose(context, step.nodes, step.count))
        if len(thoughts) != len(step.nodes):
            raise TaskError(
                f"{method} returned {len(thoughts)} lists of thoughts for {len(step.nodes)} nodes: return one per node"
            )
        return [as_proposals(siblings, self.context.task) for siblings in thoughts]

    def _evaluator_of(self, step: Evaluate) -> Evaluator:
        fast = self.search.options.fast_evaluator if step.fast else None
        evaluator: Evaluator = self._evaluator if fast is None else fast
        return evaluator

    async def _answer(self) -> Any | None:
        """Return the answer of the best state, or the result of a vote of all complete states.

        After a vote, `search.best` is the most valuable state with that answer. Returns None if no state gives an
        answer, or if the budget is spent. Without a vote, the best measured state is used if thoughts are measured.
        """
        self.answers.choose_measured()
        nodes = self.answers.candidates
        return self.answers.elect(nodes, await self._ask(nodes))

    async def _ask(self, nodes: Sequence[Node]) -> list[Any | None]:
        """Return each state's answer: from the state itself, or else from the model."""
        answers = [self.search.answer_at(node) for node in nodes]
        missing = self.answers.missing(nodes, answers, stopped=self.stopped is not None)
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        if not missing or not self.backend.can("answer") or limit or self._halted:
            return answers
        if self._checkpoint is not None and (recorded := self._checkpoint.answers()) is not None:
            self._replay(recorded)
            pairs = zip(answers, recorded.results, strict=True)
            return [self.search.checked.restored(saved) if own is None else own for own, saved in pairs]
        calls, total = self.backend.calls, self.meter.total
        self._running[None] = asking = asyncio.create_task(self.answers.ask([nodes[i] for i in missing]))
        try:
            async with asyncio.timeout(self._patience) as patience:
                replies = await asking
        except (asyncio.CancelledError, TimeoutError):
            if patience.expired():
                self.stopped = f"budget: {self.meter.overspent()}"
            elif not self._halted:
                raise
            await self.backend.cancel()
            return answers
        finally:
            del self._running[None]
        for i, reply in zip(missing, replies, strict=True):
            answers[i] = await asyncio.to_thread(self.answers.parse, reply)  # a task may be slow
            self.tree.add_calls({nodes[i].id: reply.calls})
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        elif self._checkpoint is not None:
            self._checkpoint.write({None: self._record(answers, calls, total)}, self.tree)
        return answers
