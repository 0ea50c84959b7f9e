"""State evaluators: how promising a state is, on the task's scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.request import Message, Request, Sampling
from tot.search.problem import Problem, is_cut
from tot.state import State
from tot.task import Task

Prompt = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A state's value, and what it took. None where a budget cut the evaluation off."""

    value: float | None
    new_tokens: int = 0
    seconds: float = 0.0
    parse_failures: int = 0


class StateEvaluator(Protocol):
    def prompt(self, task: Task, state: State) -> Prompt:
        """What is asked about a state; states with equal prompts are the same state."""

    async def evaluate(self, problem: Problem, states: Sequence[tuple[Prompt, State]]) -> list[Evaluation]:
        """An evaluation for each state."""


class _Asked(BaseModel):
    """Evaluators that ask the task's value template."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def prompt(self, task: Task, state: State) -> Prompt:
        return task.prompt(task.value, state, **state.thoughts[-1].parts)


class Value(_Asked):
    """Asks for a number and reads it (ToT, section 3, "State evaluator", a; SEED, Appendix C).

    The value is the mean over `samples` replies. A reply that can't be read counts as the task's default value.
    """

    samples: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0

    async def evaluate(self, problem: Problem, states: Sequence[tuple[Prompt, State]]) -> list[Evaluation]:
        task = problem.task
        requests = []
        for prompt, _ in states:
            seed = problem.evaluation_seed(prompt)
            sampling = problem.sampling(task.value, self.temperature, seed, n=self.samples, max_tokens=16)
            requests.append(problem.request(prompt, sampling, "evaluate"))
        evaluations = []
        for completions in await problem.complete(requests):
            read = [task.parse_value(completion.text) for completion in completions]
            failures = sum(value is None for value in read)
            cut = any(map(is_cut, completions))
            values = [task.default_value if value is None else value for value in read]
            evaluations.append(
                Evaluation(
                    None if cut else sum(values) / len(values),
                    sum(completion.usage.new_tokens for completion in completions),
                    max(completion.usage.seconds for completion in completions),
                    0 if cut else failures,
                )
            )
        return evaluations


class Likelihood(_Asked):
    """The expected number on the task's scale under the model: every number scored as a continuation, none decoded.

    Each is scored with the end of turn after it, since "1" is also how "10" begins. The value is the mean of the
    numbers weighted by their probabilities: one packed forward, no sampling, no parsing.
    """

    async def evaluate(self, problem: Problem, states: Sequence[tuple[Prompt, State]]) -> list[Evaluation]:
        low, high = problem.task.scale
        numbers = range(low, high + 1)
        requests = []
        for prompt, _ in states:
            space = " " if prompt[-1].role == "assistant" else ""
            requests.append(
                Request(
                    prompt=prompt,
                    sampling=Sampling(seed=problem.evaluation_seed(prompt)),
                    purpose="evaluate",
                    choices=tuple(f"{space}{number}" for number in numbers),
                    close_choices=True,
                )
            )
        evaluations = []
        for (completion,) in await problem.complete(requests):
            logprobs = [choice.total for choice in completion.choice_logprobs]
            value = None if is_cut(completion) else expected(list(numbers), logprobs)
            evaluations.append(Evaluation(value, completion.usage.new_tokens, completion.usage.seconds))
        return evaluations


def expected(numbers: Sequence[float], logprobs: Sequence[float]) -> float:
    """The mean of `numbers` weighted by exp(logprobs); their plain mean where all are impossible."""
    top = max(logprobs)
    if top == -math.inf:
        return sum(numbers) / len(numbers)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    return sum(number * weight for number, weight in zip(numbers, weights, strict=True)) / sum(weights)
