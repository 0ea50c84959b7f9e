"""Value: parse a number from the model's reply (ToT, section 3, "State evaluator", a; SEED, Appendix D).

Classify: parse a label (ToT, section 4.1: sure, likely or impossible).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from tot.evaluators.base import Labels, TemplateEvaluator
from tot.llm.context import Context
from tot.llm.parallel_steps import candidate, said_of
from tot.llm.replies import NOTHING, Evaluation, Reply, spent
from tot.task.task import Task
from tot.tree.tree import Node


class Value(TemplateEvaluator):
    """Ask the model for a number and parse it.

    The value is the mean over `samples` replies. A reply that can't be parsed counts as the lowest value.

    If the task has a template `values`, `pdos` evaluates all children of a state in one reply. The reply has a parallel
    step for each child and a conclusion with all numbers. A number in a step counts only if the conclusion lacks it.
    """

    samples: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def read(self, task: Task, text: str) -> float | None:
        """Return the value in a reply, or None."""
        return task.parse_value(text)

    def together(self, ctx: Context) -> bool:
        """Return whether siblings are evaluated in one reply."""
        return self.template is None and ctx.writes_steps and "values" in ctx.task.prompts

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        together = self.together(ctx)
        groups: dict[int | None, list[Node]] = {}
        for node in nodes:
            groups.setdefault(node.parent if together else node.id, []).append(node)
        results = await ctx.each(list(groups.values()), lambda group: self._evaluate(ctx, group))
        evaluations = {
            node.id: value
            for group, values in zip(groups.values(), results, strict=True)
            for node, value in zip(group, values, strict=True)
        }
        return [evaluations[node.id] for node in nodes]

    async def _evaluate(self, ctx: Context, group: Sequence[Node]) -> list[Evaluation]:
        """Evaluate the nodes of one request. The first evaluation carries the usage."""
        task, temperature = ctx.task, self.temperature
        if len(group) == 1:
            replies = await ctx.ask(
                self.template_for(task), group[0], self.samples, temperature=temperature, max_tokens=16
            )
            texts = [[[reply.completion.text] for reply in replies]]
        else:
            assert group[0].parent is not None  # the root has no siblings
            parent = ctx.tree[group[0].parent]
            titles = [candidate(number) for number in range(1, len(group) + 1)]
            candidates = [task.candidate(ctx.state(node)) for node in group]
            replies = await ctx.ask(
                "values",
                parent,
                self.samples,
                temperature=temperature,
                max_tokens=16,
                titles=titles,
                candidates=candidates,
            )
            texts = [[said_of(reply.completion, title) for reply in replies] for title in titles]
        return [self._mean(task, replies, about, first=not i) for i, about in enumerate(texts)]

    def _mean(self, task: Task, replies: Sequence[Reply], texts: Sequence[Sequence[str]], first: bool) -> Evaluation:
        read = [next((value for one in some if (value := self.read(task, one)) is not None), None) for some in texts]
        values = [float(task.scale[0]) if value is None else value for value in read]
        cut = any(reply.cut for reply in replies)
        mean, unread = (None, 0) if cut else (sum(values) / len(values), read.count(None))
        calls = tuple(call for reply in replies for call in reply.calls)
        return Evaluation(mean, spent(replies), unread, calls=calls) if first else Evaluation(mean, NOTHING, unread)


class Classify(Value):
    """Ask the model for a label and parse it: sure, likely or impossible; good or bad. Each label has a value.

    The last label in a reply counts, except for negated labels ("not good"). Each state has its own request.
    """

    labels: Labels | None = None
    """The value of each label; None uses the task's `labels`, or the numbers of its scale, parsed as in `Value`."""

    def together(self, ctx: Context) -> bool:
        return False

    def read(self, task: Task, text: str) -> float | None:
        labels = self.labels or task.labels
        if not labels:
            return super().read(task, text)
        words = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
        matches = re.findall(rf"(?<!\w)(not\s+(?:a\s+)?)?({words})(?!\w)", text, re.IGNORECASE)
        labels_found = [label.lower() for negation, label in matches if not negation]
        values = {label.lower(): value for label, value in labels.items()}
        return values[labels_found[-1]] if labels_found else None
