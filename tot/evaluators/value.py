"""Value: parse a number from the model's reply (ToT, section 3, "State evaluator", a; SEED, Appendix D).

Classify: parse a label (ToT, section 4.1: sure, likely or impossible).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from tot.evaluators.base import TemplateEvaluator
from tot.llm.context import Context
from tot.llm.replies import Evaluation, spent
from tot.task.task import Task
from tot.tree.thought import to_text
from tot.tree.tree import Node


class Value(TemplateEvaluator):
    """Ask the model for a number and parse it.

    The value is the mean over `samples` replies. A reply that can't be parsed counts as the lowest value.
    """

    samples: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def read(self, task: Task, text: Any) -> float | None:
        """Return the value in a reply, or in the object of a template with a schema; None without one."""
        return task.parse_value(text)

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        return await ctx.each(nodes, lambda node: self._evaluate(ctx, node))

    async def _evaluate(self, ctx: Context, node: Node) -> Evaluation:
        task, temperature = ctx.task, self.temperature
        replies = await ctx.ask(self.template, node, self.samples, temperature=temperature, max_tokens=16)
        texts = [task.read(self.template, reply.completion.text) for reply in replies]
        found = [None if text is None else self.read(task, text) for text in texts]
        calls = tuple(call for reply in replies for call in reply.calls)
        if any(reply.cut for reply in replies):
            return Evaluation(None, spent(replies), calls=calls)
        values = [float(task.scale[0]) if value is None else value for value in found]
        return Evaluation(sum(values) / len(values), spent(replies), found.count(None), calls=calls)


class Classify(Value):
    """Ask the model for one of the task's `labels`, such as sure, likely or impossible, each with a value.

    The last label in a reply counts, except for negated labels ("not good"). Without labels, parse a number.
    """

    def read(self, task: Task, text: Any) -> float | None:
        if not (labels := task.labels):
            return super().read(task, text)
        words = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
        matches = re.findall(rf"(?<!\w)(not\s+(?:a\s+)?)?({words})(?!\w)", to_text(text), re.IGNORECASE)
        labels_found = [label.lower() for negation, label in matches if not negation]
        values = {label.lower(): value for label, value in labels.items()}
        return values[labels_found[-1]] if labels_found else None
