"""Classify: the model writes a label, which is read (ToT, section 4.1: sure, likely or impossible)."""

from __future__ import annotations

import re

from tot.context import Context
from tot.evaluators.base import Labels
from tot.evaluators.value import Value
from tot.task import Task


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
