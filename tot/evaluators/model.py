"""State evaluators that ask the model: how promising a state is.

ToT, section 3, "State evaluator": each state by itself (a: Value, Classify, Likelihood), or against others (b: Vote).
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tot.calls import Call, calls_of
from tot.decoders.request import Completion, Message, Request, Sampling
from tot.parallel import candidate, conclusion, said_of, with_room
from tot.backend import is_cut
from tot.search.session import Problem, spent
from tot.steps import NOTHING, Evaluation
from tot.state import State
from tot.task import Task
from tot.tree import Node

Prompt = tuple[Message, ...]
Labels = Mapping[str, float]


class StateEvaluator(Protocol):
    def key(self, problem: Problem, node: Node) -> Hashable | None:
        """Nodes with equal keys get one evaluation between them, once a problem; None is never shared."""

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        """An evaluation for each node."""


class Evaluator(BaseModel):
    """Base of the evaluators here: options, and no sharing of evaluations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def key(self, problem: Problem, node: Node) -> Hashable | None:
        return None


class _Asked(Evaluator):
    """Asks a template about each state; states with equal prompts are the same state."""

    template: str | None = None
    """The task's `value` template where it is None."""

    def prompt(self, task: Task, state: State) -> Prompt:
        """What is asked about a state."""
        return task.prompt(self.template or task.value, state, **state.thoughts[-1].parts)

    def key(self, problem: Problem, node: Node) -> Hashable | None:
        return type(self).__name__, repr(self), self.prompt(problem.task, problem.tree.state(node))


class Value(_Asked):
    """Asks for a number and reads it (SEED, Appendix C).

    The value is the mean over `samples` replies. A reply that can't be read counts as the task's default value. Where
    the task has a template `values`, `pdos` judges all candidates after a state in one reply: side by side, as parallel
    steps, and then together, in a conclusion that gives every number. A step's own number counts where that does not.
    """

    samples: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def read(self, task: Task, text: str) -> float | None:
        return task.parse_value(text)

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        groups = self._groups(problem, nodes)
        requests = [self._request(problem, group) for group in groups]
        found: dict[int, Evaluation] = {}
        for group, request, completions in zip(groups, requests, await problem.complete(requests), strict=True):
            means = self._means(problem.task, len(group), request, completions)
            found.update(zip((node.id for node in group), means, strict=True))
        return [found[node.id] for node in nodes]

    def _groups(self, problem: Problem, nodes: Sequence[Node]) -> list[list[Node]]:
        """Nodes that one request is about."""
        groups: dict[int | None, list[Node]] = {}
        together = self._asks_together(problem)
        for node in nodes:
            groups.setdefault(node.parent if together else node.id, []).append(node)
        return list(groups.values())

    def _asks_together(self, problem: Problem) -> bool:
        parallel = self.template is None and problem.decoder_name("evaluate") == "pdos"
        return parallel and problem.task.has_template(problem.task.values)

    def _request(self, problem: Problem, group: Sequence[Node]) -> Request:
        task, states = problem.task, [problem.tree.state(node) for node in group]
        if len(group) == 1:
            template, prompt = self.template or task.value, self.prompt(task, states[0])
        else:
            template, parent = task.values, group[0].parent
            assert parent is not None  # the root is alone
            before = problem.tree.state(problem.tree[parent])
            prompt = task.prompt(template, before, candidates=[task.candidate(state) for state in states])
        seed = problem.evaluation_seed(prompt)
        sampling = problem.sampling(template, self.temperature, seed, n=self.samples, max_tokens=16)
        if len(group) == 1:
            return Request(prompt=prompt, sampling=sampling, purpose="evaluate")
        titles = tuple(map(candidate, range(1, len(group) + 1)))
        return Request(prompt=prompt, sampling=with_room(sampling, len(group)), steps=titles, purpose="evaluate")

    def _means(
        self, task: Task, count: int, request: Request, completions: Sequence[Completion]
    ) -> Iterator[Evaluation]:
        """An evaluation for each of the request's nodes; the first has its costs."""
        template = task.values if count > 1 else self.template or task.value
        usage, calls = spent(completions), calls_of(template, request, completions)
        cut = any(map(is_cut, completions))
        for number in range(1, count + 1):
            about = [said_of(one, candidate(number)) if count > 1 else [one.text] for one in completions]
            read = [
                next((value for text in texts if (value := self.read(task, text)) is not None), None) for texts in about
            ]
            values = [task.default_value if value is None else value for value in read]
            mean, unread = (None, 0) if cut else (sum(values) / len(values), sum(value is None for value in read))
            yield Evaluation(mean, usage, unread, calls=calls) if number == 1 else Evaluation(mean, NOTHING, unread)


class Classify(Value):
    """Asks for a label and reads it: sure, likely or impossible; good or bad. Each label is worth a number.

    The last label that a reply names counts; one that it denies ("not good") does not. Each state is asked about by
    itself.
    """

    labels: Labels | None = None
    """What each label is worth; None takes the task's own `labels`, or the numbers of its scale, as `Value` reads them.
    """

    def _asks_together(self, problem: Problem) -> bool:
        return False

    def read(self, task: Task, text: str) -> float | None:
        labels = self.labels or task.labels
        if not labels:
            return super().read(task, text)
        words = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(not\s+(?:a\s+)?)?({words})(?!\w)", text, re.IGNORECASE)
        named = [label.lower() for denied, label in found if not denied]
        worth = {label.lower(): value for label, value in labels.items()}
        return worth[named[-1]] if named else None


class Likelihood(_Asked):
    """The expected value under the model: every label or number scored as a continuation, none decoded.

    Each is scored with the end of turn after it, since "1" is also how "10" begins. The value is the mean of what the
    labels are worth, weighted by their probabilities: one packed forward, no sampling, no parsing. With the labels
    {"Yes": 1, "No": 0} it is the probability of Yes against No: RAP's self-evaluation.
    """

    labels: Labels | None = None
    """What each label is worth; None takes the task's own `labels`, or the numbers of its scale."""

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        labels = _numbers(self.labels, problem.task)
        requests = []
        for node in nodes:
            prompt = self.prompt(problem.task, problem.tree.state(node))
            space = " " if prompt[-1].role == "assistant" else ""
            requests.append(
                Request(
                    prompt=prompt,
                    sampling=Sampling(seed=problem.evaluation_seed(prompt)),
                    purpose="evaluate",
                    choices=tuple(f"{space}{label}" for label in labels),
                    close_choices=True,
                )
            )
        done = zip(requests, await problem.complete(requests), strict=True)
        template = self.template or problem.task.value
        return [
            _expected(labels, completion, calls_of(template, request, [completion])) for request, (completion,) in done
        ]


class Explain(_Asked):
    """Has the model explain its judgement first, then takes the expected value as `Likelihood` does (SEED, Appendix C).

    The explanation is a rationale with an answer trigger, the task's for this template, so `fastcot` may cut it. Where
    the task has none, the trigger names what there is to choose from.
    """

    template: str | None = "explain"
    labels: Labels | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def request(self, task: Task, prompt: Prompt, sampling: Sampling) -> Request:
        """A rationale from the prompt on, then the labels scored."""
        labels = _numbers(self.labels, task)
        trigger = f"\nThe answer, one of {', '.join(labels)}, is:"
        return Request(
            prompt=prompt,
            sampling=sampling,
            purpose="evaluate",
            answer_trigger=task.triggers.get(self.template or task.value, trigger),
            choices=tuple(f" {label}" for label in labels),
            close_choices=True,
        )

    def value(self, task: Task, completion: Completion) -> float | None:
        """None where a budget cut it off."""
        return _expected(_numbers(self.labels, task), completion).value

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        task, template = problem.task, self.template or problem.task.value
        requests = []
        for node in nodes:
            prompt = self.prompt(task, problem.tree.state(node))
            sampling = problem.sampling(template, self.temperature, problem.evaluation_seed(prompt), max_tokens=128)
            requests.append(self.request(task, prompt, sampling))
        done = zip(requests, await problem.complete(requests), strict=True)
        labels = _numbers(self.labels, task)
        return [
            _expected(labels, completion, calls_of(template, request, [completion])) for request, (completion,) in done
        ]


class Vote(Evaluator):
    """Shows all candidates side by side, and asks which is best; a state's value is its share of the votes.

    The candidates are numbered from 1 in an order drawn anew for every vote, so that no place is favoured. A vote that
    can't be read is nobody's. `pdos` first judges all candidates side by side, as parallel steps of the reply.
    """

    samples: Annotated[int, Field(ge=1)] = 5
    temperature: Annotated[float, Field(ge=0)] = 0.7

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        task = problem.task
        if len(nodes) == 1:
            return [Evaluation(1.0)]
        texts = [task.candidate(problem.tree.state(node)) for node in nodes]
        root = problem.tree.state(problem.tree.root)
        orders, requests = [], []
        for vote in range(self.samples):
            order = list(range(len(nodes)))
            problem.growth.random("vote", [problem.tree.place(node) for node in nodes], vote).shuffle(order)
            prompt = task.prompt(task.vote, root, candidates=[texts[i] for i in order])
            seed = problem.evaluation_seed(prompt, vote)
            sampling = problem.sampling(task.vote, self.temperature, seed, max_tokens=64)
            steps: tuple[str, ...] = ()
            if problem.decoder_name("evaluate") == "pdos":
                steps = tuple(map(candidate, range(1, len(nodes) + 1)))
                sampling = with_room(sampling, len(steps))
            orders.append(order)
            requests.append(Request(prompt=prompt, sampling=sampling, steps=steps, purpose="evaluate"))
        votes = [0] * len(nodes)
        completions = [completion for (completion,) in await problem.complete(requests)]
        unread = 0
        for order, completion in zip(orders, completions, strict=True):
            choice = task.parse_vote(conclusion(completion), len(nodes))
            if choice is None:
                unread += not is_cut(completion)
            else:
                votes[order[choice - 1]] += 1
        cut = any(map(is_cut, completions))
        calls = tuple(
            call
            for request, completion in zip(requests, completions, strict=True)
            for call in calls_of(task.vote, request, [completion])
        )
        first = Evaluation(None if cut else votes[0] / self.samples, spent(completions), unread, calls=calls)
        return [first, *(Evaluation(None if cut else count / self.samples) for count in votes[1:])]


def expected(numbers: Sequence[float], logprobs: Sequence[float]) -> float:
    """The mean of `numbers` weighted by exp(logprobs); their plain mean where all are impossible."""
    top = max(logprobs)
    if top == -math.inf:
        return sum(numbers) / len(numbers)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    return sum(number * weight for number, weight in zip(numbers, weights, strict=True)) / sum(weights)


def _expected(labels: Labels, completion: Completion, calls: tuple[Call, ...] = ()) -> Evaluation:
    logprobs = [choice.total for choice in completion.choice_logprobs]
    value = None if is_cut(completion) else expected(list(labels.values()), logprobs)
    return Evaluation(value, completion.usage, calls=calls)


def _numbers(labels: Labels | None, task: Task) -> Labels:
    """Labels and what they are worth: those given, the task's own, or the numbers of its scale."""
    low, high = task.scale
    return labels or task.labels or {str(number): number for number in range(low, high + 1)}
