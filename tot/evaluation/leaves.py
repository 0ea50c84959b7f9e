"""What an evaluation's folder holds of the solutions in a tree: their answers, and how right each is."""

from __future__ import annotations

import json
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
    """A sample's tree, and of those of its leaves that are whole solutions or hold an answer by themselves, by number,
    the answer and its score: none where the search failed before it began."""
    path = folder / "trees" / f"{sample['id']}.json"
    if not path.exists():
        return ThoughtTree(State(question=sample["question"])), {}
    tree, checked = ThoughtTree.from_json(json.loads(path.read_text())), CheckedTask(task)
    found: dict[int, tuple[Any, float]] = {}
    for node in tree.leaves():
        answer = checked.answer_at(tree.state(node)) if node.thought is not None else None
        if answer is not None or checked.is_whole(node.thought):
            found[node.id] = answer, 0.0 if answer is None else float(task.score(answer, sample["reference"]))
    return tree, found
