"""Likelihood: the expected value under the model, from the scores of all labels (RAP's self-evaluation).

Explain: the same after an explanation (SEED, Appendix D).
"""

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
    """Compute the expected value under the model: score every label as a continuation, decode none.

    Each label is scored with the end of turn after it, because "1" is a prefix of "10". The value is the mean of the
    labels' values, weighted by their probabilities. With the labels {"Yes": 1, "No": 0} it is the probability of Yes
    against No: RAP's self-evaluation.
    """

    labels: Labels | None = None
    """The value of each label; None uses the task's `labels`, or the numbers of its scale."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        task, labels = ctx.task, labels_of(self.labels, ctx.task)

        async def judge(node: Node) -> Evaluation:
            reply = await ctx.score(self.template, node, list(labels), **self._explanation(task))
            return reply.evaluation(expected([*labels.values()], reply.logprobs) if reply.logprobs else None)

        return await ctx.each(nodes, judge)

    def _explanation(self, task: Task) -> dict[str, Any]:
        """Return arguments of `Context.score` that request an explanation; empty here."""
        return {}


class Explain(Likelihood):
    """Let the model explain its evaluation first, then compute the expected value like `Likelihood`.

    The explanation is a rationale with the task's answer trigger for this template, so `fastcot` may cut it. The
    default trigger lists the labels.
    """

    template: str = "explain"
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def check(self, task: Task, search: Any, generator: Any) -> None:
        super().check(task, search, generator)
        if task.prompts.is_default(self.template):
            task.prompts.require("value")  # the default template includes it

    def trigger(self, task: Task) -> str:
        """Return the text between the explanation and the label."""
        default = f"\nThe answer, one of {', '.join(labels_of(self.labels, task))}, is:"
        return task.triggers.get(self.template, default)

    def _explanation(self, task: Task) -> dict[str, Any]:
        return {"trigger": self.trigger(task), "temperature": self.temperature, "max_tokens": 128}


def expected(numbers: Sequence[float], logprobs: Sequence[float]) -> float:
    """Return the mean of `numbers` weighted by exp(logprobs), or the plain mean if all are impossible."""
    return sum(number * weight for number, weight in zip(numbers, softmax(logprobs), strict=True))
