"""Problem: one question under search. Expands, evaluates and answers for whatever search drives it.

It owns the tree, derives every call's seed, evaluates equal prompts once, and knows when the budget is spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tot.backends import Backend
from tot.decoders.budget import Meter
from tot.decoders.request import Completion, Message, Purpose, Request, Sampling
from tot.seeds import derive
from tot.state import State
from tot.task import Task
from tot.tree import Node, ThoughtTree

if TYPE_CHECKING:
    from tot.thoughts import ThoughtGenerator
    from tot.values import Evaluation, StateEvaluator

Watcher = Callable[["Problem"], None]


class Problem:
    """What a search works on: `expand`, `evaluate`, `answer`, and the tree that results."""

    def __init__(
        self,
        task: Task,
        question: str,
        backend: Backend,
        generator: ThoughtGenerator,
        evaluator: StateEvaluator,
        meter: Meter,
        seed: int = 0,
        problem_id: str | None = None,
        max_tokens: int | None = None,
        watch: Watcher | None = None,
    ) -> None:
        root = task.start(question)
        self.task = task
        self.tree = ThoughtTree(root)
        self.meter = meter
        self.calls = 0
        """Samples asked of a decoder: n a request."""
        self.parse_failures = 0
        self.best: Node = self.tree.root
        """The most valuable node among those that the search would answer from."""
        self.stopped: str | None = None
        """Why the search ended early, if it did."""
        self._backend = backend
        self._generator = generator
        self._evaluator = evaluator
        self._seed = seed
        self._id = problem_id or root.question
        self._max_tokens = max_tokens
        self._watch = watch
        self._evaluations: dict[tuple[Message, ...], asyncio.Future[Evaluation]] = {}
        self.changed()

    def changed(self) -> None:
        if self._watch is not None:
            self._watch(self)

    def out_of_budget(self) -> bool:
        """True once a limit is reached; remembers which."""
        if self.stopped is None and (limit := self.meter.exhausted()) is not None:
            self.stopped = f"budget: {limit}"
        return self.stopped is not None

    # -- what searches call -------------------------------------------------------------------------------------

    async def expand(self, nodes: Sequence[Node], count: int) -> list[Node]:
        """`count` thoughts after each node; the new children, in the order of their parents."""
        proposals = await self._generator.propose(self, nodes, count)
        children = []
        for node, drafts in zip(nodes, proposals, strict=True):
            for draft in drafts:
                node.parse_failures += draft.parse_failures
                self.parse_failures += draft.parse_failures
                if draft.thought is None:
                    continue
                child = self.tree.add(node, draft.thought, new_tokens=draft.new_tokens, seconds=draft.seconds)
                child.terminal = self.task.is_terminal(self.tree.state(child))
                children.append(child)
        self.meter.count(nodes=len(children))
        self.changed()
        return children

    async def evaluate(self, nodes: Sequence[Node]) -> None:
        """Give every node its value. Equal prompts are evaluated once a problem, concurrent ones included."""
        prompts = [self._evaluator.prompt(self.task, self.tree.state(node)) for node in nodes]
        new: dict[tuple[Message, ...], State] = {}
        for node, prompt in zip(nodes, prompts, strict=True):
            if prompt not in self._evaluations and prompt not in new:
                new[prompt] = self.tree.state(node)
        pending = asyncio.get_running_loop().create_future
        waiting: dict[tuple[Message, ...], asyncio.Future[Evaluation]] = {prompt: pending() for prompt in new}
        self._evaluations |= waiting
        if new:
            try:
                results = await self._evaluator.evaluate(self, list(new.items()))
            except BaseException:
                for prompt, future in waiting.items():
                    del self._evaluations[prompt]
                    future.cancel()
                raise
            for future, result in zip(waiting.values(), results, strict=True):
                future.set_result(result)
        counted: set[tuple[Message, ...]] = set()
        for node, prompt in zip(nodes, prompts, strict=True):
            evaluation = await self._evaluations[prompt]
            node.value = evaluation.value
            if prompt in new and prompt not in counted:
                counted.add(prompt)
                node.new_tokens += evaluation.new_tokens
                node.seconds += evaluation.seconds
                node.parse_failures += evaluation.parse_failures
                self.parse_failures += evaluation.parse_failures
        self.changed()

    async def answer(self, node: Node) -> str | None:
        """Ask for the answer at a node; None where the reply holds none."""
        state = self.tree.state(node)
        prompt = self.task.prompt(self.task.answer, state)
        sampling = self.sampling(self.task.answer, 0.0, derive(self._seed, self._id, self.tree.place(node), "answer"))
        (completion,) = (await self.complete([self.request(prompt, sampling, "answer")]))[0]
        prefix = prompt[-1].content + " " if prompt[-1].role == "assistant" else ""
        return None if is_cut(completion) else self.task.parse_answer(prefix + completion.text)

    # -- what generators and evaluators call --------------------------------------------------------------------

    def generation_seed(self, node: Node, template: str, call: int) -> int:
        """hash(run seed, problem id, node path, purpose, call index)."""
        return derive(self._seed, self._id, self.tree.place(node), "generate", template, call)

    def evaluation_seed(self, prompt: Sequence[Message]) -> int:
        """hash(run seed, problem id, prompt): equal states get equal values whenever they are met."""
        return derive(self._seed, self._id, [message.model_dump() for message in prompt])

    def sampling(self, template: str, temperature: float, seed: int, n: int = 1, **fallback: object) -> Sampling:
        """The task's sampling options for a template, with the search's temperature and token limit."""
        options = {**fallback, **self.task.sampling.get(template, {})}
        if self._max_tokens is not None:
            options["max_tokens"] = min(self._max_tokens, int(options.get("max_tokens", self._max_tokens)))
        return Sampling(**{"temperature": temperature, **options, "seed": seed, "n": n})

    def request(self, prompt: tuple[Message, ...], sampling: Sampling, purpose: Purpose) -> Request:
        return Request(prompt=prompt, sampling=sampling, purpose=purpose)

    async def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        self.calls += sum(request.sampling.n for request in requests)
        return await self._backend.complete(requests, self.meter) if requests else []


def is_cut(completion: Completion) -> bool:
    """True where a budget or a cancellation ended the text before its time."""
    return completion.finish_reason in ("budget", "cancelled")
