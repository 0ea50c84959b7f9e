"""AB-MCTS: its choices have treequest's frequencies, and it finds good thoughts more often with a larger budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from tot import Expand, Task, Thought
from tot.search.ab_mcts import ABMCTS, _Scores, scaled

Built = Sequence[tuple[int, float]]
"""The nodes of a tree, in order: parent (0 is the root) and score."""
TREES: dict[str, Built] = {
    "one child": [(0, 0.5)],
    "one good child": [(0, 0.2), (0, 0.9), (0, 0.1)],
    "deep": [(0, 0.2), (1, 0.5), (2, 0.8), (3, 0.9)],
    "both": [(0, 0.3), (0, 0.6), (2, 0.7), (2, 0.2), (1, 0.9), (3, 1.0), (0, 0.0)],
}


class Hidden(Task):
    """A tree whose thoughts are numbers; a thought's value is written in it."""

    templates = {"thought": "", "value": "", "answer": ""}  # noqa: RUF012
    depth = 99


def ours(tree: Built, draws: int) -> Counter[int]:
    """Count which node is expanded next."""
    options = ABMCTS()
    search = options.start(Hidden(), "?")
    run = _Scores(options, search)
    for number, (parent, score) in enumerate(tree):
        node = search.tree.add(search.tree[parent], Thought(parts={"thought": str(number)}))
        node.value = score
        run.observe(search.tree[parent], "generate", [node])
    return Counter(run.select()[0].id for _ in range(draws))


def theirs(tree: Built, draws: int) -> Counter[int]:
    import numpy as np
    from treequest import ABMCTSA

    np.random.seed(7)  # the generator that scipy uses there
    algorithm: Any = ABMCTSA(dist_type="gaussian")
    state = algorithm.init_tree()
    state.all_rewards_store["model"] = []
    nodes = [state.tree.root]
    for parent, score in tree:
        state.thompson_states.get_or_create(nodes[parent], ["model"])
        trial = state.trial_store.create_trial(nodes[parent], "model")
        state = algorithm.tell(state, trial.trial_id, (str(score), score))
        nodes.append(nodes[parent].children[-1])
    _, trials = algorithm.ask_batch(state, draws, ["model"])
    numbers = {node.expand_idx: number for number, node in enumerate(nodes)}
    return Counter(numbers[trial.node_to_expand] for trial in trials)


@pytest.mark.statistics
@pytest.mark.parametrize("name", TREES)
def test_choices_have_the_frequencies_of_treequest(name: str) -> None:
    counts = ours(TREES[name], 10_000), theirs(TREES[name], 10_000)
    nodes = sorted({*counts[0], *counts[1]})
    table = [[count[node] for node in nodes] for count in counts]
    assert len(nodes) > 1
    assert chi2_contingency(table).pvalue > 1e-3, dict(zip(nodes, zip(*table, strict=True), strict=True))


@pytest.mark.parametrize("together", [1, 5, 100])
def test_the_number_of_thoughts_is_limited(together: int) -> None:
    search = ABMCTS(iterations=7, together=together).start(Hidden(), "?")
    expanded, widest = 0, 0
    while steps := search.pending():
        widest = max(widest, len(steps))
        step = steps[0]
        if isinstance(step, Expand):
            expanded += 1
            search.tell([[str(expanded)] for _ in step.nodes], step=step)
        else:
            search.tell([0.5 for _ in step.nodes], step=step)
    assert expanded == len(search.tree) - 1 == 7
    assert widest == min(together, 7)


def test_each_turn_of_a_node_has_a_number() -> None:
    search = ABMCTS(iterations=6, together=2).start(Hidden(), "?")
    turns: Counter[tuple[int, int]] = Counter()
    while (step := search.ask()) is not None:
        if isinstance(step, Expand):
            turns[step.nodes[0].id, step.turn] += 1
            search.tell([[f"{len(search.tree)}"]])
        else:
            search.tell([0.0])
    assert set(turns.values()) == {1}
    assert {turn for node, turn in turns if node == 0} == set(range(sum(node == 0 for node, _ in turns)))


def test_failed_thoughts_count_as_the_worst_and_end_nothing() -> None:
    search = ABMCTS(iterations=60, together=1).start(Hidden(), "?")
    after: Counter[str] = Counter()
    while (step := search.ask()) is not None:
        if isinstance(step, Expand):
            (state,) = step.states
            after[state.thoughts[0].text if state.thoughts else "root"] += 1
            works = not state.thoughts or state.thoughts[0].text == "good"
            search.tell([["good" if len(search.tree) == 1 else f"bad {len(search.tree)}"] if works else []])
        else:
            search.tell([0.9 if "good" in state.text else None for state in step.states])
    assert after.total() == 60
    assert search.best.value == 0.9
    assert after["good"] > after["root"]


def test_values_outside_of_the_unit_interval_become_ranks() -> None:
    assert scaled([0.2, 1.0, None]) == {0.2: 0.2, 1.0: 1.0, None: 0.0}
    assert scaled([-5.0, -2.0, None, 300.0, -2.0]) == {-5.0: 1 / 3, -2.0: 2 / 3, 300.0: 1.0, None: 0.0}
    assert scaled([]) == {None: 0.0}


def test_a_pruned_thought_is_not_expanded() -> None:
    search = ABMCTS(iterations=30, together=1).start(
        Hidden(),
        "?",
        hooks={"on_evaluate": lambda search, nodes: [] if search.tree.state(nodes[0]).text == "0.9" else None},
    )
    parents = []
    texts = iter(["0.9", *(f"0.1{i:02}" for i in range(99))])
    while (step := search.ask()) is not None:
        if isinstance(step, Expand):
            parents += [node.id for node in step.nodes]
            search.tell([[next(texts)]])
        else:
            search.tell([float(state.thoughts[-1].text) for state in step.states])
    assert search.tree[1].pruned
    assert len(parents) == 30
    assert 1 not in parents
