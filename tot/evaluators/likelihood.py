"""Likelihood: the value that the model expects, every label scored as a continuation; RAP's self-evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from tot.context import Context
from tot.evaluators.base import Labels, TemplateEvaluator, labels_of
from tot.steps import Evaluation, softmax
from tot.tree import Node


class Likelihood(TemplateEvaluator):
    """The expected value under the model: every label or number scored as a continuation, none decoded.

    Each is scored with the end of turn after it, since "1" is also how "10" begins. The value is the mean of what the
    labels are worth, weighted by their probabilities: one packed forward, no sampling, no parsing. With the labels
    {"Yes": 1, "No": 0} it is the probability of Yes against No: RAP's self-evaluation.
    """

    labels: Labels | None = None
    """What each label is worth; None takes the task's own `labels`, or the numbers of its scale."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        labels = labels_of(self.labels, ctx.task)

        async def judge(node: Node) -> Evaluation:
            reply = await ctx.score(self.asked(ctx.task), node, list(labels))
            return reply.evaluation(expected([*labels.values()], reply.logprobs) if reply.logprobs else None)

        return await ctx.each(nodes, judge)


def expected(numbers: Sequence[float], logprobs: Sequence[float]) -> float:
    """The mean of `numbers` weighted by exp(logprobs); their plain mean where all are impossible."""
    return sum(number * weight for number, weight in zip(numbers, softmax(logprobs), strict=True))
