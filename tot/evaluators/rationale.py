"""Explain: the model explains its judgement, then its labels are scored (SEED, Appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from tot.context import Context, scoring
from tot.decoders.request import Completion, Message, Request, Sampling
from tot.evaluators.base import Labels, TemplateEvaluator, labels_of
from tot.evaluators.likelihood import expected
from tot.steps import Evaluation
from tot.task import Task
from tot.tree import Node


class Explain(TemplateEvaluator):
    """Has the model explain its judgement first, then takes the expected value as `Likelihood` does.

    The explanation is a rationale with an answer trigger, the task's for this template, so `fastcot` may cut it. Where
    the task has none, the trigger names what there is to choose from.
    """

    template: str | None = "explain"
    labels: Labels | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def trigger(self, task: Task) -> str:
        """What comes between the explanation and the label."""
        default = f"\nThe answer, one of {', '.join(labels_of(self.labels, task))}, is:"
        return task.triggers.get(self.asked(task), default)

    def request(self, task: Task, prompt: tuple[Message, ...], sampling: Sampling) -> Request:
        """A rationale from the prompt on, then the labels scored."""
        return scoring(prompt, list(labels_of(self.labels, task)), sampling, trigger=self.trigger(task))

    def value(self, task: Task, completion: Completion) -> float | None:
        """None where a budget cut it off."""
        logprobs = [choice.total for choice in completion.choice_logprobs]
        return expected([*labels_of(self.labels, task).values()], logprobs) if logprobs else None

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        task, labels = ctx.task, list(labels_of(self.labels, ctx.task))
        template, trigger = self.asked(task), self.trigger(task)

        async def judge(node: Node) -> Evaluation:
            reply = await ctx.score(
                template, node, labels, trigger=trigger, temperature=self.temperature, max_tokens=128
            )
            return reply.evaluation(self.value(task, reply.completion))

        return await ctx.each(nodes, judge)
