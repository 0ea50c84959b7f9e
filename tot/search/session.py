"""Problem: one question under search, with a model to ask. It does the steps that a search asks for.

It derives every call's seed, evaluates equal states once, writes the trace, and knows when the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tot.calls import calls_of
from tot.checkpoint import Checkpoint, Recorded
from tot.decoders.budget import Meter
from tot.decoders.request import Completion, Message, Purpose, Request, Sampling, Usage
from tot.backend import Backend, is_cut
from tot.search.base import Search, by_value
from tot.seeds import derive
from tot.steps import Evaluate, Evaluation, Expand, Proposal, Step
from tot.task import Task
from tot.tree import Node, ThoughtTree
from tot.written import as_written

if TYPE_CHECKING:
    from tot.evaluators.model import StateEvaluator
    from tot.generators.base import ThoughtGenerator

Watcher = Callable[["Problem"], None]


class Problem:
    """A search at work on a question: `run` grows the tree, `answer` asks for the answer where it ended."""

    def __init__(
        self,
        task: Task,
        question: str,
        backend: Backend,
        search: Search,
        generator: ThoughtGenerator,
        evaluator: StateEvaluator,
        meter: Meter,
        *,
        seed: int = 0,
        problem_id: str | None = None,
        max_tokens: int | None = None,
        filters: Mapping[str, float] | None = None,
        watch: Watcher | None = None,
        hooks: object | None = None,
        trace: Checkpoint | None = None,
    ) -> None:
        self.task = task
        self.search = search.start(task, question, seed=seed, hooks=hooks)
        self.meter = meter
        self.calls = 0
        """Samples asked of a decoder: n a request."""
        self.stopped: str | None = None
        """Why the work ended early, if it did."""
        self._backend = backend
        self._search = search
        self._generator = generator
        self._evaluator = evaluator
        self._seed = seed
        self._id = problem_id or self.tree.state(self.tree.root).question
        self._max_tokens = max_tokens
        self.filters = dict(filters or {})
        """Which tokens may be drawn: top_k, top_p and min_p, where a task's template says nothing else."""
        self._watch = watch
        self._trace = trace
        self._evaluations: dict[Hashable, Evaluation] = {}
        if trace is not None:
            parts = {"search": search, "generator": generator, "evaluator": evaluator}
            about = {name: _described(part) for name, part in parts.items()}
            root = self.tree.state(self.tree.root)
            about |= {"task": type(task).__name__, "seed": seed, "problem_id": problem_id, "max_tokens": max_tokens}
            about["filters"] = self.filters or None
            trace.begin(root, about)
        self.changed()

    @property
    def tree(self) -> ThoughtTree:
        return self.search.tree

    def changed(self) -> None:
        if self._watch is not None:
            self._watch(self)

    # -- the search -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Do what the search asks for until it ends or a budget is spent."""
        while (step := self.search.ask()) is not None:
            if self._spent_out(step):
                return
            recorded = self._trace.step(step) if self._trace is not None else None
            nodes, calls, total = len(self.tree), self.calls, self.meter.total
            if recorded is not None:
                results = self._replay(recorded)
                if isinstance(step, Evaluate):
                    self._remember(self._evaluator_of(step), step.nodes, results)
            else:
                results = await (self._expand(step) if isinstance(step, Expand) else self._evaluate(step))
            try:
                self.search.tell(results)
                self.search.ask()  # on to the next step: what the search makes of the results belongs to this one
            finally:  # a task that fails on the results is no reason to lose them
                self.meter.count(nodes=len(self.tree) - nodes)
                # A step that a budget may have cut short is not recorded: with more to spend it is done anew.
                if recorded is None and self._trace is not None and self.meter.overspent() is None:
                    done = Recorded(results, self.calls - calls, self.meter.total - total)
                    self._trace.write_step(step, done, self.tree)
            self.changed()

    def _spent_out(self, step: Step) -> bool:
        limit = self.meter.exhausted() if isinstance(step, Expand) else self.meter.overspent()
        if limit is not None:
            self.stopped = f"budget: {limit}"
        return limit is not None

    async def _expand(self, step: Expand) -> list[list[Proposal]]:
        if step.whole:
            from tot.generators.base import chains

            return await chains(self, step.nodes, step.count or 1, getattr(self._generator, "temperature", 0.7))
        return await self._generator.propose(self, step.nodes, step.count)

    async def _evaluate(self, step: Evaluate) -> list[Evaluation]:
        return await self.judge(self._evaluator_of(step), step.nodes)

    def _evaluator_of(self, step: Evaluate) -> StateEvaluator:
        fast: StateEvaluator | None = getattr(self._search, "fast", None)
        return fast if step.fast and fast is not None else self._evaluator

    # -- the answer -----------------------------------------------------------------------------------------------

    async def answer(self) -> Any | None:
        """The answer of the best state, or the one that complete states vote for, which leaves its best voter behind;
        None where there is none, or the budget is spent."""
        search = self.search
        voting = self._search.aggregate == "vote"
        nodes = [search.best] if not voting else search.complete() if search.solved is None else [search.solved]
        answers = await self._answers(nodes)
        said = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if answer is not None]
        if not said:
            return None
        ballots: dict[Hashable, list[tuple[Node, Any]]] = {}
        for node, answer in said:
            ballots.setdefault(self.task.canonical(answer), []).append((node, answer))
        weights = _weights(nodes)
        winner = max(ballots.values(), key=lambda voters: math.fsum(weights[node.id] for node, _ in voters))
        search.best = by_value([node for node, _ in winner])[0]
        return next(answer for node, answer in winner if node is search.best)

    async def _answers(self, nodes: Sequence[Node]) -> list[Any | None]:
        """What each state says: by itself, or when asked."""
        answers = [self.search.answer_at(node) for node in nodes]
        unasked = [i for i, answer in enumerate(answers) if answer is None and not self._is_chain(nodes[i])]
        # A search that a budget ended before its first thought has nothing to ask about.
        asked = [i for i in unasked if nodes[i].parent is not None or self.stopped is None]
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        if not asked or not self._backend.can("answer") or limit:
            return answers
        recorded = self._trace.answers() if self._trace is not None else None
        if recorded is not None:
            return self._replay(recorded)
        calls, total = self.calls, self.meter.total
        requests = [self._answer_request(nodes[i]) for i in asked]
        for i, request, (completion,) in zip(asked, requests, await self.complete(requests), strict=True):
            answers[i] = None if is_cut(completion) else self._read(request, completion)
            self.tree.asked({nodes[i].id: calls_of(self.task.answer, request, [completion])})
        if limit := self.meter.overspent():
            self.stopped = f"budget: {limit}"
        elif self._trace is not None:
            self._trace.write_answers(Recorded(answers, self.calls - calls, self.meter.total - total), self.tree)
        return answers

    def _is_chain(self, node: Node) -> bool:
        return node.thought is not None and self.task.chain in node.thought.parts

    def _answer_request(self, node: Node) -> Request:
        state, task = self.tree.state(node), self.task
        prompt = as_written(task.prompt(task.answer, state), state.thoughts)
        seed = derive(self._seed, self._id, self.tree.place(node), "answer")
        choices = tuple(task.choices(state))
        if choices:
            space = " " if prompt[-1].role == "assistant" else ""
            scored = tuple(f"{space}{choice}" for choice in choices)
            return Request(prompt=prompt, choices=scored, sampling=Sampling(seed=seed), purpose="answer")
        return Request(prompt=prompt, sampling=self.sampling(task.answer, 0.0, seed), purpose="answer")

    def _read(self, request: Request, completion: Completion) -> Any | None:
        if request.choices:
            scores = [choice.total for choice in completion.choice_logprobs]
            return request.choices[scores.index(max(scores))].strip()
        last = request.prompt[-1]
        # The line that the reply goes on with may say what it is ("The answer is"); those before it are no answer.
        prefix = ""
        if isinstance(last, Message) and last.role == "assistant":
            prefix = last.content.rpartition("\n")[2] + " "
        return self.task.parse_answer(prefix + completion.text)

    # -- what generators and evaluators call ----------------------------------------------------------------------

    async def judge(self, evaluator: StateEvaluator, nodes: Sequence[Node]) -> list[Evaluation]:
        """An evaluation for each node; nodes of equal keys have one between them, which is paid for once."""
        keys = [evaluator.key(self, node) for node in nodes]
        new: dict[Hashable, Node] = {}
        for i, (key, node) in enumerate(zip(keys, nodes, strict=True)):
            if key is None:
                new[i, "unshared"] = node
            elif key not in self._evaluations:
                new.setdefault(key, node)
        fresh = dict(zip(new, await evaluator.evaluate(self, list(new.values())), strict=True)) if new else {}
        evaluations = []
        for i, key in enumerate(keys):
            if key is None:
                evaluations.append(fresh[i, "unshared"])
                continue
            if key in fresh and key not in self._evaluations:
                self._evaluations[key] = replace(fresh[key], usage=Usage(), parse_failures=0, calls=())
                evaluations.append(fresh[key])
            else:
                evaluations.append(self._evaluations[key])
        return evaluations

    def actions(self, node: Node) -> Sequence[str]:
        """The task's legal actions at a node."""
        return self.search.actions(node)

    def generation_seed(self, node: Node, template: str, call: int) -> int:
        """hash(run seed, problem id, node path, purpose, call index)."""
        return derive(self._seed, self._id, self.tree.place(node), "generate", template, call)

    def evaluation_seed(self, prompt: Sequence[Message], call: int = 0) -> int:
        """hash(run seed, problem id, prompt): equal states get equal values whenever they are met."""
        about = [message.model_dump(include={"role", "content"}) for message in prompt]
        return derive(self._seed, self._id, about, *([call] if call else []))

    def sampling(self, template: str, temperature: float, seed: int, n: int = 1, **fallback: object) -> Sampling:
        """The task's sampling options for a template, with the search's temperature and the run's filters and limit."""
        options = {**fallback, **self.filters, **self.task.sampling.get(template, {})}
        if self._max_tokens is not None:
            options["max_tokens"] = min(self._max_tokens, int(options.get("max_tokens", self._max_tokens)))
        return Sampling(**{"temperature": temperature, **options, "seed": seed, "n": n})

    async def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The n completions of each request."""
        self.calls += sum(request.sampling.n for request in requests)
        return await self._backend.complete(requests, self.meter) if requests else []

    def decoder_name(self, purpose: Purpose) -> str | None:
        return self._backend.name(purpose)

    # -- the trace ------------------------------------------------------------------------------------------------

    def _replay(self, recorded: Recorded) -> list[Any]:
        """The results of a step that was done before the run was killed, and the accounts as they were then."""
        self.calls += recorded.calls
        self.meter.replay(recorded.spent)
        self.tree.asked(recorded.asked)
        return recorded.results

    def _remember(self, evaluator: Any, nodes: Sequence[Node], evaluations: Sequence[Evaluation]) -> None:
        for node, evaluation in zip(nodes, evaluations, strict=True):
            key = evaluator.key(self, node)
            if key is not None and evaluation.value is not None:
                self._evaluations.setdefault(key, replace(evaluation, usage=Usage(), parse_failures=0, calls=()))
        for i, part in enumerate(getattr(evaluator, "parts", ())):
            self._remember(part, nodes, [evaluation.parts[i] for evaluation in evaluations])


def spent(completions: Sequence[Completion]) -> Usage:
    """What samples drawn side by side took together: their seconds are not added up."""
    usage = sum((completion.usage for completion in completions), Usage())
    return replace(usage, seconds=max((completion.usage.seconds for completion in completions), default=0.0))


def _weights(nodes: Sequence[Node]) -> dict[int, float]:
    """What each state's vote counts: its value, or 1; once for every thought folded into it.

    Where values may be below 0 (logarithms, minus a cost), their exponentials count.
    """
    values = {node.id: 1.0 if node.value is None else node.value for node in nodes}
    if any(value < 0 for value in values.values()):
        top = max(values.values())
        values = {i: math.exp(value - top) for i, value in values.items()}
    return {node.id: values[node.id] * (1 + node.merged) for node in nodes}


def _described(part: object) -> Any:
    """Options as JSON data, to tell whether two runs are the same."""
    if not isinstance(part, BaseModel):
        return type(part).__name__
    options = part.model_dump(mode="json", fallback=lambda value: getattr(value, "__qualname__", type(value).__name__))
    return {"name": type(part).__name__, **options}
