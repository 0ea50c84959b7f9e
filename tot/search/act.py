"""Acting without looking ahead: what a search over a world that answers has to beat (ReAct, Yao et al., 2023)."""

from __future__ import annotations

from tot.search.base import Search
from tot.search.state import SearchState
from tot.steps import Steps


class Act(Search):
    """One path, of the thought generator's first thought each time, which may lead back to where it has been."""

    wanders = True

    def steps(self, search: SearchState) -> Steps:
        while not search.is_end(search.best):
            children = yield search.expand([search.best], 1)
            if not children:
                return
            search.best = children[0]
