"""Value: the model writes a number, which is read (ToT, section 3, "State evaluator", a; SEED, Appendix C). Classify:
a label (ToT, section 4.1: sure, likely or impossible)."""

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
    """Asks for a number and reads it.

    The value is the mean over `samples` replies. A reply that can't be read counts as the task's default value. Where
    the task has a template `values`, `pdos` judges all candidates after a state in one reply: side by side, as parallel
    steps, and then together, in a conclusion that gives every number. A step's own number counts where that does not.
    """

    samples: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0

    def read(self, task: Task, text: str) -> float | None:
        """The value in a reply; None where there is none."""
        return task.parse_value(text)

    def together(self, ctx: Context) -> bool:
        """Whether siblings are judged in one reply."""
        return self.template is None and ctx.writes_steps and ctx.task.has_template(ctx.task.values)

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        together = self.together(ctx)
        groups: dict[int | None, list[Node]] = {}
        for node in nodes:
            groups.setdefault(node.parent if together else node.id, []).append(node)
        judged = await ctx.each(list(groups.values()), lambda group: self._judge(ctx, group))
        found = {
            node.id: value
            for group, values in zip(groups.values(), judged, strict=True)
            for node, value in zip(group, values, strict=True)
        }
        return [found[node.id] for node in nodes]

    async def _judge(self, ctx: Context, group: Sequence[Node]) -> list[Evaluation]:
        """An evaluation for each of the nodes that one request is about; the first has its costs."""
        task, heat = ctx.task, self.temperature
        if len(group) == 1:
            replies = await ctx.ask(self.asked(task), group[0], self.samples, temperature=heat, max_tokens=16)
            texts = [[[reply.completion.text] for reply in replies]]
        else:
            assert group[0].parent is not None  # the root is alone
            parent = ctx.tree[group[0].parent]
            titles = [candidate(number) for number in range(1, len(group) + 1)]
            candidates = [task.candidate(ctx.state(node)) for node in group]
            replies = await ctx.ask(
                task.values, parent, self.samples, temperature=heat, max_tokens=16, titles=titles, candidates=candidates
            )
            texts = [[said_of(reply.completion, title) for reply in replies] for title in titles]
        return [self._mean(task, replies, about, first=not i) for i, about in enumerate(texts)]

    def _mean(self, task: Task, replies: Sequence[Reply], texts: Sequence[Sequence[str]], first: bool) -> Evaluation:
        read = [next((value for one in some if (value := self.read(task, one)) is not None), None) for some in texts]
        values = [task.default_value if value is None else value for value in read]
        cut = any(reply.cut for reply in replies)
        mean, unread = (None, 0) if cut else (sum(values) / len(values), read.count(None))
        calls = tuple(call for reply in replies for call in reply.calls)
        return Evaluation(mean, spent(replies), unread, calls=calls) if first else Evaluation(mean, NOTHING, unread)


class Classify(Value):
    """Asks for a label and reads it: sure, likely or impossible; good or bad. Each label is worth a number.

    The last label that a reply names counts; one that it denies ("not good") does not. Each state is asked about by
    itself.
    """

    labels: Labels | None = None
    """What each label is worth; None takes the task's own `labels`, or the numbers of its scale, as `Value` reads them.
    """

    def together(self, ctx: Context) -> bool:
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
