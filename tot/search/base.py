"""What a search is: options, and a generator of steps that leaves its best node behind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tot.evaluators.base import Evaluator
from tot.llm.replies import Steps
from tot.search.state import SearchState
from tot.tree.thought import State
from tot.tree.tree import Node

if TYPE_CHECKING:
    from tot.task.task import Task

Depth = Annotated[int, Field(ge=1)] | None
Count = Annotated[int, Field(ge=1)]


class Search(BaseModel):
    """Options of a search algorithm; `steps` is the algorithm, `start` sets it going."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    few_shot: ClassVar[bool] = False
    """Whether it is made for the papers' few-shot prompts."""
    whole: ClassVar[bool] = False
    """Whether it has whole solutions written in one go."""
    greedy_draft: ClassVar[bool] = False
    """Whether a whole solution that is asked for alone is decoded greedily, whatever the temperature."""
    wanders: ClassVar[bool] = False
    """Whether a path may lead back to a state that it has been in."""
    depth: Depth = None
    """T: T - 1 levels of thoughts, then the answer; None takes the task's own."""
    aggregate: Literal["best", "vote", "majority"] = "best"
    """The answer of the best state; or answers of all complete states, voting with their values, or one vote each."""

    def start(self, task: Task, question: str | State, *, seed: int = 0, hooks: object | None = None) -> SearchState:
        """This search at the root of a new tree, to be driven by `ask` and `tell`."""
        return SearchState(self, task, question, seed=seed, hooks=hooks)

    @abstractmethod
    def steps(self, search: SearchState) -> Steps:
        """Yield what is to be done next; keep `search.best` at the best so far: a search may be stopped any time."""

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        """What the search brings for a task and its generator, by kind: another one, an evaluator, itself anew."""
        return {}

    @property
    def fast_evaluator(self) -> Evaluator | None:
        """What judges new nodes cheaply, where that is another than the state evaluator."""
        return None

    def depth_for(self, task: Task) -> int | None:
        """T for a task; None is no limit."""
        return self.depth or task.depth

    def merges(self, root: State) -> bool:
        """True where a state that was met before, anywhere in the tree, is not grown again."""
        return False


class MergingSearch(Search):
    """A search that can grow a graph of thoughts."""

    merge: bool | None = None
    """Fold equal states together (a graph of thoughts); None: where the task has a world."""

    def merges(self, root: State) -> bool:
        return root.world is not None if self.merge is None else self.merge


def by_value(nodes: Sequence[Node]) -> list[Node]:
    """Most valuable first; equals keep the order in which they came; nodes without a value come last."""
    return sorted(nodes, key=lambda node: float("inf") if node.value is None else -node.value)
