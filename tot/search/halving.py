"""Sequential halving over drafts (Karnin et al., 2013): spend more revisions on the better drafts."""

from __future__ import annotations

import math
from typing import Self

from pydantic import model_validator

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class SequentialHalving(Search):
    """Sample drafts, then revise them in rounds. Each round keeps the better half of the drafts.

    A draft is as good as the best thought in its line: itself and its revisions. All rounds have the same number of
    revisions, which revise the best thought of each remaining line.
    """

    drafts: Count = 8
    """Number of drafts."""
    iterations: Count = 32
    """Number of thoughts, with the drafts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.drafts > self.iterations:
            raise ValueError(f"{self.drafts} drafts are more than {self.iterations} iterations: raise iterations")
        return self

    def steps(self, search: SearchState) -> Steps:
        drafts = yield search.expand([search.tree.root], self.drafts)
        drafts = yield search.evaluate(drafts)
        lines = [[draft] for draft in drafts]
        search.best = next(iter(by_value(drafts)), search.best)
        left = self.iterations - self.drafts
        rounds = max(1, math.ceil(math.log2(max(1, len(lines)))))
        for number in range(rounds):
            lines = sorted(lines, key=_rank)[: math.ceil(len(lines) / 2)]
            budget = left // (rounds - number)
            revised = [line for line in lines if not search.is_end(_best(line))][:budget]
            if search.solved is not None:
                return
            if not revised:  # the next rounds share the revisions that are left
                continue
            left -= budget // len(revised) * len(revised)
            children = yield search.expand([_best(line) for line in revised], budget // len(revised))
            children = yield search.evaluate(children)
            for child in children:
                next(line for line in lines if any(node.id == child.parent for node in line)).append(child)
            search.best = by_value([search.best, *children])[0]


def _best(line: list[Node]) -> Node:
    return by_value(line)[0]


def _rank(line: list[Node]) -> float:
    """Sort key: the best lines first, and lines without a value last."""
    value = _best(line).value
    return math.inf if value is None else -value
