"""Likelihood: the value that the model expects, every label scored as a continuation; RAP's self-evaluation. Explain:
the same after an explanation (SEED, Appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from tot.evaluators.base import Labels, TemplateEvaluator, labels_of
from tot.llm.context import Context
from tot.llm.replies import Evaluation, softmax
from tot.task.task import Task
from tot.tree.tree import Node


class Likelihood(TemplateEvaluator):
    """The expected value under the model: every label or number scored as a continuation, none decoded.

    Each is scored with the end of turn after it, since "1" is also how "10" begins. The value is the mean of what the
    labels are worth, weighted by their probabilities: one packed forward, no sampling, no parsing. With the labels
    {"Yes": 1, "No": 0} it is the probability of Yes against No: RAP's self-evaluation.
    """

    labels: Labels | None = None
    """What each label is worth; None takes the task's own `labels`, or the numbers of its scale."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        task, labels = ctx.task, labels_of(self.labels, ctx.task)

        async def judge(node: Node) -> Evaluation:
            reply = await ctx.score(self.asked(task), node, list(labels), **self._explaining(task))
            return reply.evaluation(expected([*labels.values()], reply.logprobs) if reply.logprobs else None)

        return await ctx.each(nodes, judge)

    def _explaining(self, task: Task) -> dict[str, Any]:
        """What `Context.score` is given for an explanation; nothing here."""
        return {}


class Explain(Likelihood):
    """Has the model explain its judgement first, then takes the expected value as `Likelihood` does.

    The explanation is a rationale with an answer trigger, the task's for this template, so `fastcot` may cut it. Where
    the task has none, the trigger names what there is to choose from.
    """

    template: str | None = "explain"
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def trigger(self, task: Task) -> str:
        """What comes between the explanation and the label."""
        default = f"\nThe answer, one of {', '.join(labels_of(self.labels, task))}, is:"
        return task.triggers.get(self.asked(task), default)

    def _explaining(self, task: Task) -> dict[str, Any]:
        return {"trigger": self.trigger(task), "temperature": self.temperature, "max_tokens": 128}


def expected(numbers: Sequence[float], logprobs: Sequence[float]) -> float:
    """The mean of `numbers` weighted by exp(logprobs); their plain mean where all are impossible."""
    return sum(number * weight for number, weight in zip(numbers, softmax(logprobs), strict=True))
