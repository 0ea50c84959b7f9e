"""SearchSession: run a search with a model. It executes the steps of a SearchState in a budget and records them.

The SearchState owns the tree and yields the next step. The session holds the generator, the evaluator and the budget.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from tot.decoders.errors import TaskError
from tot.decoders.request import Message, Usage
from tot.evaluators.base import Evaluator, judge, remember
from tot.generators.base import Generator
from tot.generators.sample import Sample, distinct_solutions, whole_solution, whole_solutions
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.llm.replies import Evaluation, Proposal, Reply, as_proposal
from tot.sandbox import can_confine
from tot.search.base import Search, by_value
from tot.search.certainty import Curve
from tot.search.checkpoint import Checkpoint, Recorded
from tot.search.execution import Execution, each_of, execute
from tot.search.in_progress import InProgress
from tot.search.steps import Evaluate, Expand, Step
from tot.search.votes import Ballot, cast
from tot.task.checked import user_code
from tot.task.task import Task
from tot.task.world import HasAnswer, HasMeasured
from tot.tree.tree import Node, ThoughtTree

Watcher = Callable[["SearchSession"], None]
_GRACE = 2.0
"""Seconds after the limit on seconds in which running texts and actions may end."""


class SearchSession:
    """One search with a model: `run` grows the tree, `answer` returns the answer of its best state."""

    def __init__(
        self,
        task: Task,
        question: str,
        backend: Backend,
        search: Search,
        generator: Generator,
        evaluator: Evaluator,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
        filters: Mapping[str, float] | None = None,
        watch: Watcher | None = None,
        hooks: object | None = None,
        checkpoint: Checkpoint | None = None,
        reproducible: bool = False,
        curve: Curve | None = None,
    ) -> None:
        """Start the search. With `reproducible`, nothing depends on which sample or branch ends first."""
        self.task = task
        self.curve = curve
        """The certainty of its votes; None if it is not known."""
        self.search = search.start(task, question, seed=seed, hooks=hooks)
        """The running search, which yields the steps."""
        self.search.escalates = backend.can("escalate")
        if not reproducible:  # measured latencies differ between runs
            self.search.cheap_samples = backend.cheap_samples
        self.meter = backend.meter
        self.search.budgeted = any(limit is not None for _, limit in self.meter.budget)
        self.stopped: str | None = None
        """Why the session ended early, if it did."""
        self.votes: tuple[int, int] | None = None
        """Votes for the answer, and all votes."""
        self.ballots: list[Ballot] = []
        """The vote of each complete solution with an answer, in order; known once `answer` has returned."""
        self.truncated = False
        """Whether the token limit ended the text of an answer."""
        self._backend = backend
        self._generator = generator
        self._evaluator = evaluator
        self._max_tokens = max_tokens
        self._in_progress = InProgress(ordered=reproducible)
        self._execution = Execution(self.search.checked)
        self._changed = watch or (lambda session: None)
        self._checkpoint = checkpoint
        self._counted = 0, self.meter.total
        """Calls and usage at the last results."""
        self._running: dict[Step | None, asyncio.Task[Any]] = {}
        """Tasks by step; None is the request for answers."""
        self._halted = False
        ordered = search.merges(self.tree.state(self.tree.root)) or getattr(evaluator, "compares", False)
        self._by_level = reproducible or ordered
        """Whether branches wait for each other: merging and comparing states depends on the order of results."""
        # A subclass may override `propose`, and evaluators that compare need all thoughts.
        self.search.one_by_one = type(generator) is Sample and not ordered
        about: dict[str, Any] = {"seed": seed, "max_tokens": max_tokens}
        self.context = Context(self.search.checked, self.tree, backend, filters=filters, **about)
        self._evaluating, self._answering = self.context.to("evaluate"), self.context.to("answer")
        if search.whole:
            self.search.distinct = distinct_solutions(self.context, self.tree.root, generator, self._templates)
        if checkpoint is not None:
            self.search.cheap_samples = checkpoint.setting("cheap_samples", self.search.cheap_samples)
            # Resuming with another budget does not change whether `iterations` is unlimited.
            self.search.budgeted = bool(checkpoint.setting("budgeted", checkpoint.empty and self.search.budgeted))
            about |= {"cheap_samples": self.search.cheap_samples, "budgeted": self.search.budgeted or None}
            parts = {"search": search, "generator": generator, "evaluator": evaluator}
            described = {name: options_to_json(part) for name, part in parts.items()}
            about |= {"task": type(task).__name__, "filters": self.context.filters or None}
            about |= {"prompts": "chat"} if task.prompts == "chat" else {}
            about |= {"version": task.version} if task.version else {}
            about["models"] = backend.fingerprints
            checkpoint.begin(self.tree.state(self.tree.root), described | about)
        self._changed(self)

    @property
    def tree(self) -> ThoughtTree:
        return self.search.tree

    @property
    def calls(self) -> int:
        """Number of samples requested from decoders: n per request."""
        return self._backend.calls

    @property
    def by_model(self) -> dict[str, dict[str, int]]:
        """Calls, prompt tokens and new tokens by model; empty if there is only one."""
        return self._backend.by_model

    @property
    def asks(self) -> bool:
        """Whether the model is asked for answers. States that contain their answers need no answer template."""
        return not isinstance(self.task, HasAnswer) or self.task.has_template(self.task.answer)

    async def run(self) -> None:
        """Execute the steps of the search until it ends or a budget is spent."""
        try:
            await self._run()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            await self._in_progress.cancel()
            await self._backend.cancel()

    def stop(self, why: str) -> None:
        """End the search with the best answer so far, without further calls. Call it in the event loop of `run`."""
        self.stopped, self._halted = why, True
        for task in self._running.values():
            task.cancel()

    async def _run(self) -> None:
        while not self._halted and (steps := self._replayed()):
            for step in steps:
                if step not in self._running and not self._is_spent(step):
                    self._running[step] = asyncio.create_task(self._results(step))
            if not self._running:
                return
            when = asyncio.ALL_COMPLETED if self._by_level else asyncio.FIRST_COMPLETED
            await asyncio.wait(self._running.values(), timeout=self._patience, return_when=when)
            if self._halted:
                return
            ended = [step for step in steps if step in self._running and self._running[step].done()]
            for step in ended:
                self._tell(step, self._running.pop(step).result(), more=self._by_level and step is not ended[-1])
            if self._patience == 0:  # a decoder, an action or an evaluator does not end
                self.stopped = f"budget: {self.meter.overspent()}"
                return

    @property
    def _patience(self) -> float | None:
        """Seconds until the running work is abandoned: shortly after the limit on seconds. None without a limit."""
        budget = self.meter.budget.seconds
        return None if budget is None else max(0.0, budget + _GRACE - self.meter.seconds)

    def _replayed(self) -> list[Step]:
        """Tell the recorded results. Return the pending steps, whose results are not recorded."""
        while (steps := self.search.pending()) and self._checkpoint is not None:
            step = self._checkpoint.next_of(steps)
            if self._is_spent(step) or (recorded := self._checkpoint.step(step)) is None:
                break
            results = self._replay(recorded)
            if isinstance(step, Expand) and step.partial:
                self._in_progress.replay(step.count or 0, step.purpose, results[0])
                self._execution.replay(step.nodes[0].id, results[0])
            if isinstance(step, Evaluate):
                remember(self._evaluating, self._evaluator_of(step), step.nodes, results)
            self._tell(step, results, recorded=True)
        return steps

    def _is_spent(self, step: Step) -> bool:
        """Return whether the budget leaves nothing for a step; if so, it is why the session ends."""
        limit = self.meter.exhausted() if isinstance(step, Expand) else self.meter.overspent()
        if limit is not None:
            self.stopped = f"budget: {limit}"
        return limit is not None

    def _tell(self, step: Step, results: list[Any], recorded: bool = False, more: bool = False) -> None:
        """Tell the search the results of a step, and record them unless they come from the checkpoint.

        `more`: the results of other steps of the same level follow.
        """
        nodes = len(self.tree)
        try:
            self.search.tell(results, acted=True, step=step)
            self.search.pending()  # run the search up to its next steps: changes to the tree belong to this one
        finally:  # record the results even if the task fails on them
            # An expansion without a new thought counts as one, so that refused thoughts spend a budget of thoughts.
            self.meter.count(nodes=max(len(self.tree) - nodes, int(isinstance(step, Expand))))
            calls, total = self._counted
            self._counted = self.calls, self.meter.total
            # Don't record a step that the budget may have cut short: a resumed run with a larger budget repeats it.
            if not recorded and self._checkpoint is not None and self.meter.overspent() is None:
                self._checkpoint.write(step, self._recorded(results, calls, total), self.tree, more)
        self._changed(self)

    async def _results(self, step: Step) -> list[list[Proposal]] | list[Evaluation]:
        if isinstance(step, Evaluate):
            return await judge(self._evaluating, self._evaluator_of(step), step.nodes)
        if step.partial:
            sampling = partial(self._sample, step)
            ended = more = await self._in_progress.advance(step.count or 0, step.purpose, sampling)
            # A spent budget allows no further step, but a thought that is being executed may be the answer.
            while more and self.meter.overspent() and not step.whole:
                more = await self._in_progress.advance(0, step.purpose, sampling)
                ended = [*ended, *more]
            return [ended]
        context = self.context.to(step.purpose, step.turn)
        if step.whole:
            about = step.count or 1, self._generator, self._templates, self.search.options.greedy_draft
            solutions = await context.each(step.nodes, lambda node: whole_solutions(context, node, *about))
            return await execute(self.search.checked, step.states, solutions)
        method = f"{type(self._generator).__name__}.propose"
        with user_code(method):
            thoughts = list(await self._generator.propose(context, step.nodes, step.count))
        if len(thoughts) != len(step.nodes):
            raise TaskError(
                f"{method} returned {len(thoughts)} lists of thoughts for {len(step.nodes)} nodes: return one per node"
            )
        proposals = [[as_proposal(one, self.context.task) for one in each_of(siblings)] for siblings in thoughts]
        return await execute(self.search.checked, step.states, proposals)

    async def _sample(self, step: Expand, number: int) -> Proposal:
        """Sample one whole solution or thought after the node of a step, and execute it."""
        context, node = self.context.to(step.purpose), step.nodes[0]
        if isinstance(self._generator, Sample) and not step.whole:
            proposal = await self._generator.sample(context, node, number, self.search.requested.together)
        else:
            proposal = await whole_solution(context, node, number, self._generator, self._templates)
        return await self._execution.execute(node.id, step.states[0], proposal)

    @property
    def _templates(self) -> tuple[str, ...]:
        """The templates of whole solutions, in turn, without programs that can't run; empty for the task's default."""
        given: tuple[str, ...] = getattr(self.search.options, "solutions", ())
        if len(set(given)) < 2 or not self.task.programs.intersection(given) or can_confine():
            return given
        return tuple(template for template in given if template not in self.task.programs)

    def _evaluator_of(self, step: Evaluate) -> Evaluator:
        fast = self.search.options.fast_evaluator if step.fast else None
        return self._evaluator if fast is None else fast

    @property
    def candidates(self) -> list[Node]:
        """The nodes whose answers vote, or the one to answer from."""
        search = self.search
        if search.options.aggregate == "best":
            return [search.best]
        return search.complete() if search.solved is None else [search.solved]

    async def answer(self) -> Any | None:
        """Return the answer of the best state, or the result of a vote of all complete states.

        After a vote, `search.best` is the most valuable state with that answer. Returns None if no state gives an
        answer, or if the budget is spent. Without a vote, the best measured state is used if thoughts are measured.
        """
        search = self.search
        if isinstance(self.task, HasMeasured) and search.options.aggregate == "best" and search.solved is None:
            values = {node.id: search.checked.measured(self.tree.state(node)) for node in self.tree}
            best = max((value for value in values.values() if value is not None), default=None)
            if best is not None and values[search.best.id] != best:
                search.best = next(node for node in self.tree if values[node.id] == best)
                if search.best.value is None:  # the root, which no search evaluates
                    search.best.value = best
        nodes = self.candidates
        voting = search.options.aggregate != "best"
        answers = await self._answers(nodes)
        answered = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if answer is not None]
        if not answered:
            return None
        question, equal = self.tree.state(self.tree.root).question, search.options.aggregate == "majority"
        self.ballots, winners = cast(search.checked, question, answered, equal)
        winner = [answered[i] for i in winners]
        search.best = by_value([node for node, _ in winner])[0]
        if search.requested.purpose == "escalate" and search.best.decoder != self._backend.name("escalate"):
            self.curve = None  # it is the second model's, which gave no answer
        total = math.fsum(ballot.weight for ballot in self.ballots)
        for (node, answer), ballot in zip(answered, self.ballots, strict=True):
            node.answer = shown_answer(answer)
            if voting and total > 0:
                node.share = math.fsum(one.weight for one in self.ballots if one.answer == ballot.answer) / total
        if voting and len(nodes) > 1:
            self.votes = len(winner), len(answered)
        return next(answer for node, answer in winner if node is search.best)

    async def _answers(self, nodes: Sequence[Node]) -> list[Any | None]:
        """Return each state's answer: from the state itself, or else from the model."""
        answers = [self.search.answer_at(node) for node in nodes]
        whole = [self.search.checked.is_whole(node.thought) for node in nodes]
        pending = [
            i
            for i, node in enumerate(nodes)
            if self.asks and answers[i] is None and not whole[i] and self._can_ask(node)
        ]
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        if not pending or not self._backend.can("answer") or limit or self._halted:
            return answers
        recorded = self._checkpoint.step(None) if self._checkpoint is not None else None
        if recorded is not None:
            return self._replay(recorded)
        calls, total = self.calls, self.meter.total
        self._running[None] = asking = asyncio.create_task(self._answering.each([nodes[i] for i in pending], self._ask))
        try:
            async with asyncio.timeout(self._patience) as patience:
                replies = await asking
        except (asyncio.CancelledError, TimeoutError):
            if patience.expired():
                self.stopped = f"budget: {self.meter.overspent()}"
            elif not self._halted:
                raise
            await self._backend.cancel()
            return answers
        finally:
            del self._running[None]
        for i, reply in zip(pending, replies, strict=True):
            answers[i] = None if reply.cut else await asyncio.to_thread(self._read, reply)  # a task may be slow
            self.tree.asked({nodes[i].id: reply.calls})
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        elif self._checkpoint is not None:
            self._checkpoint.write(None, self._recorded(answers, calls, total), self.tree)
        return answers

    def _can_ask(self, node: Node) -> bool:
        """Return whether the model can be asked for the answer at a node.

        It can't at the root if the search was stopped, or if the search has no thought and the template needs one.
        """
        if node.parent is not None:
            return True
        if self.stopped is not None or not (node.parse_failures or self.search.stopped):
            return self.stopped is None
        try:
            self._answering.prompt(self.task.answer, self.tree.state(node))
        except TaskError:
            return False
        return True

    async def _ask(self, node: Node) -> Reply:
        if choices := self.search.checked.choices(self.tree.state(node)):
            return await self._answering.score(self.task.answer, node, choices, close=False)
        return (await self._answering.ask(self.task.answer, node, temperature=0.0))[0]

    def _read(self, reply: Reply) -> Any | None:
        if reply.request.choices:
            return reply.request.choices[reply.logprobs.index(max(reply.logprobs))].strip()
        self.truncated |= reply.truncated
        # The reply continues the prefix's last line, which may announce the answer ("The answer is").
        last = reply.request.prompt[-1]
        prefix = ""
        if isinstance(last, Message) and last.role == "assistant":
            prefix = last.content.rpartition("\n")[2] + " "
        return self._answering.answer_in(prefix + reply.completion.text, reply.truncated)

    def truncation(self) -> str | None:
        """Return advice if thinking or a token limit left a solution without an answer, else None."""
        if lost := self._backend.lost:
            end = "the text was truncated" if lost.keys() & {"length", "repetition"} else "the model ended its text"
            return (
                f"{end} in its thinking, before an answer ({lost.total()} of {self.calls} texts): give it more tokens "
                "(--max-tokens, or thinking_tokens of the decoder openai), or turn its thinking off"
            )
        if not self.truncated and not any(
            one.thought and one.thought.ended and one.thought.truncated for one in self.tree
        ):
            return None
        if self._max_tokens is not None:
            return (
                f"the text was truncated at max_tokens={self._max_tokens}, before its answer: raise it (--max-tokens)"
            )
        return "the text was truncated at the task's token limit, before its answer: raise max_tokens in Task.sampling"

    def _recorded(self, results: list[Any], calls: int, total: Usage) -> Recorded:
        """Return the record of a step that began with these counts of calls and usage."""
        spent = self.meter.total - total
        return Recorded(results, self.calls - calls, spent, by_purpose=self._backend.by_purpose)

    def _replay(self, recorded: Recorded) -> list[Any]:
        """Return a recorded step's results, and count its calls and usage."""
        self._backend.replay(recorded.calls, recorded.by_purpose)
        self.meter.replay(recorded.spent)
        self.tree.asked(recorded.asked)
        return recorded.results


def shown_answer(answer: Any) -> str:
    """An answer as text: the actions of a plan in one line."""
    return "  ".join(map(str, answer)) if isinstance(answer, list | tuple) else str(answer)


def options_to_json(part: object) -> dict[str, Any]:
    """Return the options of a search, generator or evaluator as JSON data."""
    if not isinstance(part, BaseModel):
        return {"name": type(part).__name__}
    options = part.model_dump(mode="json", fallback=lambda value: getattr(value, "__qualname__", type(value).__name__))
    return {"name": type(part).__name__, **options}
