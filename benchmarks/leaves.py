"""The leaves of the trees in an evaluation's folder, with their answers and scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.thought import State
from tot.tree.tree import ThoughtTree


def read_leaves(
    folder: Path, sample: Mapping[str, Any], task: Task
) -> tuple[ThoughtTree, dict[int, tuple[Any, float]]]:
    """Return a sample's tree, and the (answer, score) of its leaves by node number.

    Skips leaves without an answer unless they are complete solutions. Empty if the search could not start.
    """
    path = folder / "trees" / f"{sample['id']}.json"
    if not path.exists():
        return ThoughtTree(State(question=sample["question"])), {}
    tree, checked = ThoughtTree.load(path), CheckedTask(task)
    scored: dict[int, tuple[Any, float]] = {}
    for node in tree:
        node.thought = node.thought and (checked.typed(node.thought) or node.thought)
    for node in tree.leaves():
        answer = checked.answer_at(tree.state(node)) if node.thought is not None else None
        if answer is not None or checked.is_whole(node.thought):
            scored[node.id] = answer, 0.0 if answer is None else checked.score(answer, sample["reference"])
    return tree, scored
