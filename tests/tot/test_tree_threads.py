"""A tree can be iterated in one thread while a search grows it in another, as the terminal's progress does."""

from __future__ import annotations

from tot import State, Thought, ThoughtTree


def test_a_tree_may_grow_while_its_nodes_are_iterated() -> None:
    tree = ThoughtTree(State(question="q"))
    for text in "abc":
        tree.add(tree.root, Thought(parts={"thought": text}), None)
    seen = []
    for node in tree:
        seen.append(node.id)
        tree.add(tree.root, Thought(parts={"thought": f"more {node.id}"}), None)
    assert seen == [0, 1, 2, 3]
    assert len(tree) == 8
