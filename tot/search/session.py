"""SearchSession: a search at work. It does with a model what a SearchState asks for, in a budget, and writes it down.

The state knows the tree and what comes next; the session knows who proposes, who judges, and when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tot.decoders.errors import TaskError
from tot.decoders.request import Message
from tot.evaluators.base import Evaluator, judge, remember
from tot.generators.base import Generator
from tot.generators.sample import chains
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.llm.replies import Evaluation, Proposal, Reply, as_proposal
from tot.search.base import Search, by_value, each_of
from tot.search.checkpoint import Checkpoint, Recorded
from tot.search.steps import Evaluate, Expand, Step
from tot.task.checked import user_code
from tot.task.task import Task
from tot.task.world import HasAnswer
from tot.tree.thought import after_thinking
from tot.tree.tree import Node, ThoughtTree

Watcher = Callable[["SearchSession"], None]


class SearchSession:
    """`run` grows the tree, `answer` asks for the answer where it ended."""

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
    ) -> None:
        self.task = task
        self.search = search.start(task, question, seed=seed, hooks=hooks)
        """The search under way, which says what is to be done."""
        self.meter = backend.meter
        self.stopped: str | None = None
        """Why the work ended early, if it did."""
        self.votes: tuple[int, int] | None = None
        """Votes for the answer, and all votes."""
        self.truncated = False
        """The token limit ended the answer's own text."""
        self._backend = backend
        self._generator = generator
        self._evaluator = evaluator
        self._max_tokens = max_tokens
        self._changed = watch or (lambda session: None)
        self._checkpoint = checkpoint
        about: dict[str, Any] = {"seed": seed, "max_tokens": max_tokens}
        judges = filter(None, (evaluator, getattr(search, "fast_evaluator", None)))
        layers = sorted({layer for judge in judges for layer in getattr(judge, "layers", ())})
        self.context = Context(self.search.checked, self.tree, backend, filters=filters, layers=layers, **about)
        self._judging, self._answering = self.context.to("evaluate"), self.context.to("answer")
        if checkpoint is not None:
            parts = {"search": search, "generator": generator, "evaluator": evaluator}
            described = {name: _described(part) for name, part in parts.items()}
            about |= {"task": type(task).__name__, "filters": self.context.filters or None}
            about |= {"prompts": "chat"} if task.prompts == "chat" else {}
            checkpoint.begin(self.tree.state(self.tree.root), described | about)
        self._changed(self)

    @property
    def tree(self) -> ThoughtTree:
        return self.search.tree

    @property
    def calls(self) -> int:
        """Samples asked of a decoder: n a request."""
        return self._backend.calls

    async def run(self) -> None:
        """Do what the search asks for until it ends or a budget is spent."""
        while (step := self.search.ask()) is not None:
            limit = self.meter.exhausted() if isinstance(step, Expand) else self.meter.overspent()
            if limit is not None:
                self.stopped = f"budget: {limit}"
                return
            recorded = self._checkpoint.step(step) if self._checkpoint is not None else None
            nodes, calls, total = len(self.tree), self.calls, self.meter.total
            if recorded is not None:
                results = self._replay(recorded)
                if isinstance(step, Evaluate):
                    remember(self._judging, self._evaluator_of(step), step.nodes, results)
            else:
                results = await self._results(step)
            try:
                self.search.tell(results, acted=True)
                self.search.ask()  # on to the next step: what the search makes of the results belongs to this one
            finally:  # a task that fails on the results is no reason to lose them
                self.meter.count(nodes=len(self.tree) - nodes)
                # A step that a budget may have cut short is not recorded: with more to spend it is done anew.
                if recorded is None and self._checkpoint is not None and self.meter.overspent() is None:
                    done = Recorded(results, self.calls - calls, self.meter.total - total)
                    self._checkpoint.write(step, done, self.tree)
            self._changed(self)

    async def _results(self, step: Step) -> list[list[Proposal]] | list[Evaluation]:
        if isinstance(step, Evaluate):
            return await judge(self._judging, self._evaluator_of(step), step.nodes)
        if step.whole:
            options = self.search.options
            ways, greedy = getattr(options, "solutions", ()), options.greedy_draft
            found = await chains(self.context, step.nodes, step.count or 1, self._generator, ways, greedy)
            return await self.search.acted(step.states, found)
        what = f"{type(self._generator).__name__}.propose"
        with user_code(what):
            grown = list(await self._generator.propose(self.context, step.nodes, step.count))
        if len(grown) != len(step.nodes):
            raise TaskError(
                f"{what} gave {len(grown)} lists of thoughts for {len(step.nodes)} nodes: give one for each"
            )
        proposals = [[as_proposal(one, self.context.task) for one in each_of(siblings)] for siblings in grown]
        return await self.search.acted(step.states, proposals)

    def _evaluator_of(self, step: Evaluate) -> Evaluator:
        fast = self.search.options.fast_evaluator if step.fast else None
        return self._evaluator if fast is None else fast

    async def answer(self) -> Any | None:
        """The answer of the best state, or the one that complete states vote for, which leaves its best voter behind;
        None where there is none, or the budget is spent."""
        search = self.search
        voting = search.options.aggregate != "best"
        nodes = [search.best] if not voting else search.complete() if search.solved is None else [search.solved]
        answers = await self._answers(nodes)
        said = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if answer is not None]
        if not said:
            return None
        equal = search.options.aggregate == "majority"
        weights = {node.id: 1.0 + node.merged for node in nodes} if equal else _weights(nodes)
        ballots = [self.context.task.canonical(answer) for _, answer in said]
        winner = [said[i] for i in elected(ballots, [weights[node.id] for node, _ in said])]
        search.best = by_value([node for node, _ in winner])[0]
        total = math.fsum(weights[node.id] for node, _ in said)
        for (node, answer), ballot in zip(said, ballots, strict=True):
            node.answer = shown_answer(answer)
            if voting and total > 0:
                same = (weights[other.id] for (other, _), one in zip(said, ballots, strict=True) if one == ballot)
                node.share = math.fsum(same) / total
        if voting and len(nodes) > 1:
            self.votes = len(winner), len(said)
        return next(answer for node, answer in winner if node is search.best)

    async def _answers(self, nodes: Sequence[Node]) -> list[Any | None]:
        """What each state says: by itself, or when asked."""
        answers = [self.search.answer_at(node) for node in nodes]
        whole = [self.search.checked.is_whole(node.thought) for node in nodes]
        # A task whose states hold their answers need not have a template for them.
        can = not isinstance(self.task, HasAnswer) or self.task.has_template(self.task.answer)
        asked = [
            i for i, node in enumerate(nodes) if can and answers[i] is None and not whole[i] and self._can_ask(node)
        ]
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        if not asked or not self._backend.can("answer") or limit:
            return answers
        recorded = self._checkpoint.step(None) if self._checkpoint is not None else None
        if recorded is not None:
            return self._replay(recorded)
        calls, total = self.calls, self.meter.total
        replies = await self._answering.each([nodes[i] for i in asked], self._ask)
        for i, reply in zip(asked, replies, strict=True):
            answers[i] = None if reply.cut else self._read(reply)
            self.tree.asked({nodes[i].id: reply.calls})
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        elif self._checkpoint is not None:
            self._checkpoint.write(None, Recorded(answers, self.calls - calls, self.meter.total - total), self.tree)
        return answers

    def _can_ask(self, node: Node) -> bool:
        """False at the root where a budget ended the search there, or no thought could be read and the template needs
        one."""
        if node.parent is not None:
            return True
        if self.stopped is not None or not node.parse_failures:
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
        # The line that the reply goes on with may say what it is ("The answer is"); those before it are no answer.
        last = reply.request.prompt[-1]
        prefix = ""
        if isinstance(last, Message) and last.role == "assistant":
            prefix = last.content.rpartition("\n")[2] + " "
        return self._answering.answer_in(prefix + after_thinking(reply.completion.text), reply.truncated)

    def truncation(self) -> str | None:
        """What to do where a token limit ended a solution before its answer; None where none did."""
        if not self.truncated and not any(
            one.thought and one.thought.ended and one.thought.truncated for one in self.tree
        ):
            return None
        if self._max_tokens is not None:
            return (
                f"the text was truncated at max_tokens={self._max_tokens}, before its answer: raise it (--max-tokens)"
            )
        return "the text was truncated at the task's token limit, before its answer: raise max_tokens in Task.sampling"

    def _replay(self, recorded: Recorded) -> list[Any]:
        """The results of a step that was done before the run was killed, and the accounts as they were then."""
        self._backend.calls += recorded.calls
        self.meter.replay(recorded.spent)
        self.tree.asked(recorded.asked)
        return recorded.results


def shown_answer(answer: Any) -> str:
    """An answer as text: the actions of a plan in one line."""
    return "  ".join(map(str, answer)) if isinstance(answer, list | tuple) else str(answer)


def elected(ballots: Sequence[Hashable], weights: Sequence[float]) -> list[int]:
    """The places of those votes that are for the answer with the most weight, of equals the first; none of none."""
    voters: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(ballots):
        voters.setdefault(answer, []).append(i)
    return max(voters.values(), key=lambda places: math.fsum(weights[i] for i in places), default=[])


def _weights(nodes: Sequence[Node]) -> dict[int, float]:
    """What each state's vote counts: its value, or 1; once for every thought folded into it.

    Where values may be below 0 (logarithms, minus a cost), their exponentials count.
    """
    values = {node.id: 1.0 if node.value is None else node.value for node in nodes}
    if any(value < 0 for value in values.values()):
        top = max(values.values())
        values = {i: 1.0 if value == top else math.exp(value - top) for i, value in values.items()}
    return {node.id: values[node.id] * (1 + node.merged) for node in nodes}


def _described(part: object) -> Any:
    """Options as JSON data, to tell whether two runs are the same."""
    if not isinstance(part, BaseModel):
        return type(part).__name__
    options = part.model_dump(mode="json", fallback=lambda value: getattr(value, "__qualname__", type(value).__name__))
    return {"name": type(part).__name__, **options}
