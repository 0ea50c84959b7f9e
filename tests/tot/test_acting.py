"""Acting tasks: observations in the tree and in prompts, one act per thought, resumed runs, and Refine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import BFS, BestOfN, Budget, Checkpoint, Observation, Refine, Sample, State, Task, Thought, asolve, solve
from tot.tree.tree import ThoughtTree


class Spell(Task):
    """A thought is a word, and its observation counts the wrong letters: dog is correct."""

    templates: ClassVar = {
        "word": "{% if thoughts %}mend {{ thoughts[-1].word }}, {{ observations[-1] }}"
        "{% else %}try {{ question }}{% endif %}"
    }
    thought = ("word",)
    depth = 3
    acted: ClassVar[list[tuple[str, str]]] = []

    async def act(self, state: State, thought: Thought) -> Observation:
        self.acted.append((state.text, thought.text))
        await asyncio.sleep(0)
        wrong = sum(a != b for a, b in zip(thought.text.ljust(3), "dog", strict=False))
        return Observation(text=f"{wrong} wrong", verified=not wrong, data=wrong)

    def heuristic(self, state: State) -> float:
        observation = state.thoughts[-1].observation
        return 9.0 if observation is None or not isinstance(observation.data, int) else float(observation.data)

    def is_terminal(self, state: State) -> bool:
        return bool(state.thoughts) and self.heuristic(state) == 0

    def answer_at(self, state: State) -> str | None:
        return state.thoughts[-1].text if state.thoughts else None


class Staggered(Spell):
    """Each act takes longer than the one before; with a negative `delay`, it takes shorter."""

    delay: ClassVar = 20

    async def act(self, state: State, thought: Thought) -> Observation:
        iterations = 200 + self.delay * len(self.acted)
        observed = await super().act(state, thought)
        for _ in range(iterations):
            await asyncio.sleep(0)
        return observed


@pytest.fixture(autouse=True)
def _acted() -> None:
    Spell.acted.clear()


@pytest.fixture
def scripted(scripted: type[Any]) -> type[Any]:
    """The scripted decoder; requests with other seeds for a prompt continue the list of its replies."""

    class InTurn(scripted):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.seeds: dict[str, list[int]] = {}

        def _reply(self, request: Any, sample: int) -> Any:
            seeds = self.seeds.setdefault(request.prompt[-1].content, [])
            if request.sampling.seed not in seeds:
                seeds.append(request.sampling.seed)
            return super()._reply(request, seeds.index(request.sampling.seed) + sample)

    return InTurn


def texts(tree: ThoughtTree) -> list[tuple[str, str | None]]:
    thoughts = [node.thought for node in tree if node.thought is not None]
    return [(one.text, None if one.observation is None else one.observation.text) for one in thoughts]


# -- acting -----------------------------------------------------------------------------------------------------


def test_an_observation_is_in_the_tree_and_in_later_prompts(scripted: Any) -> None:
    decoder = scripted({"try q": ["cat", "dot"], "mend dot, 1 wrong": ["dog", "dig"]})
    solution = solve(Spell, "q", decoder=decoder, search=BFS(thoughts=2, breadth=1), evaluator="heuristic")
    assert decoder.prompts == [["try q"], ["mend dot, 1 wrong"]]
    assert texts(solution.tree) == [("cat", "3 wrong"), ("dot", "1 wrong"), ("dog", "0 wrong"), ("dig", "1 wrong")]
    assert (solution.answer, solution.solved) == ("dog", True)


def test_equal_thoughts_of_a_state_are_acted_on_once(scripted: Any) -> None:
    solution = solve(
        Spell, "q", decoder=scripted({"try q": ["cat"] * 4}), search=BestOfN(samples=4), evaluator="heuristic"
    )
    assert Spell.acted == [("", "cat")]
    assert texts(solution.tree) == [("cat", "3 wrong")] * 4


def test_acts_of_a_step_run_concurrently(scripted: Any) -> None:
    class Meet(Spell):
        """Every act waits until all four have started."""

        here: ClassVar[list[str]] = []

        async def act(self, state: State, thought: Thought) -> Observation:
            self.here.append(thought.text)
            async with asyncio.timeout(30):
                while len(self.here) < 4:
                    await asyncio.sleep(0.001)
            return Observation(text="met", data=1)

    solution = solve(
        Meet, "q", decoder=scripted({"try q": list("abcd")}), search=BestOfN(samples=4), evaluator="heuristic"
    )
    assert texts(solution.tree) == [(letter, "met") for letter in "abcd"]


# -- resuming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Spell, Staggered])
def test_a_resumed_run_acts_on_no_thought_twice(task: type[Task], scripted: Any, tmp_path: Path) -> None:
    replies = {"try q": ["cow", "cat", "cat", "dot"], "mend dot, 1 wrong": ["dig", "dug", "dug", "dg"]}
    search, decoder = Refine(thoughts=4), scripted(replies)

    def run(trace: Checkpoint) -> Any:
        try:
            return solve(task, "q", decoder=decoder, search=search, evaluator="heuristic", checkpoint=trace)
        finally:
            trace.close()

    whole = tmp_path / "whole.jsonl"
    done = run(Checkpoint.create(whole))
    every = list(Spell.acted)
    lines = whole.read_text().splitlines(keepends=True)
    assert len(every) == 6
    for count in range(1, len(lines)):
        Spell.acted.clear()
        cut = tmp_path / f"{count}.jsonl"
        cut.write_text("".join(lines[:count]) + lines[count][: len(lines[count]) // 2])
        solution = run(Checkpoint.resume(cut))
        assert texts(solution.tree) == texts(done.tree)
        assert Spell.acted == every[len(every) - len(Spell.acted) :]
        assert len(Spell.acted) < len(every) or count <= 2


# -- Refine -----------------------------------------------------------------------------------------------------


def refined(decoder: Any, **options: Any) -> Any:
    return solve(
        Spell, "q", decoder=decoder, search=Refine(**options), generator=Sample(temperature=0.9), evaluator="heuristic"
    )


def test_a_correct_first_draft_is_the_only_request(scripted: Any) -> None:
    decoder = scripted({"try q": "dog"})
    solution = refined(decoder)
    (request,) = decoder.requests
    assert (request.sampling.n, request.sampling.temperature) == (1, 0.0)
    assert (solution.answer, solution.solved, solution.calls) == ("dog", True, 1)


def test_refine_samples_drafts_and_then_repairs_the_best(scripted: Any) -> None:
    decoder = scripted({"try q": ["cow", "cat", "dot"], "mend dot, 1 wrong": ["dig", "cot", "dog"]})
    solution = refined(decoder, thoughts=3)
    requests = [
        (request.prompt[-1].content, request.sampling.n, request.sampling.temperature) for request in decoder.requests
    ]
    assert requests == [("try q", 1, 0.0), *[("try q", 1, 0.9)] * 3, *[("mend dot, 1 wrong", 1, 0.9)] * 3]
    assert len({request.sampling.seed for request in decoder.requests[1:]}) == 6
    assert (solution.answer, solution.solved, solution.calls) == ("dog", True, 7)
    assert [node.prior for node in solution.tree][2:] == pytest.approx([1 / 3] * 6)
    assert [node.thought.text for node in solution.tree if node.chosen and node.thought] == ["dot", "dog"]


def test_refine_ends_at_full_depth_with_the_best_draft(scripted: Any) -> None:
    replies = {"try q": ["xxx"] * 2, "mend xxx, 3 wrong": ["dxx", "yyy"], "mend dxx, 2 wrong": ["dox", "dxx"]}
    shallow, deep = scripted(replies), scripted(replies)
    assert refined(shallow, thoughts=2).answer == "dxx"
    assert len(shallow.requests) == 1 + 2 + 2
    assert refined(deep, thoughts=2, depth=4).answer == "dox"
    assert len(deep.requests) == 1 + 2 + 2 + 2


def test_refine_ends_if_no_repair_is_better(scripted: Any) -> None:
    decoder = scripted({"try q": ["dot"] * 2, "mend dot, 1 wrong": ["dxx", "dot"]})
    solution = refined(decoder, thoughts=2, depth=9)
    assert (solution.answer, solution.solved, len(decoder.requests)) == ("dot", False, 1 + 2 + 2)


@pytest.mark.parametrize("task", [Spell, Staggered])
def test_a_solution_beyond_the_budget_is_still_the_answer(task: type[Task], scripted: Any) -> None:
    decoder = scripted({"try q": ["cat", "dog", "cow"]}, tokens=10)
    search = Refine(thoughts=3)
    solution = solve(task, "q", decoder=decoder, search=search, evaluator="heuristic", budget=Budget(tokens=35))
    assert (solution.answer, solution.solved) == ("dog", True)


def test_the_first_draft_that_passes_cancels_the_acts_of_the_others(scripted: Any) -> None:
    cancelled = []

    class Endless(Spell):
        async def act(self, state: State, thought: Thought) -> Observation:
            observed = await super().act(state, thought)
            if thought.text == "cat":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(thought.text)
                    raise
            return observed

    decoder = scripted({"try q": ["cow", "cat", "cot", "dog"]})
    solution = solve(Endless, "q", decoder=decoder, search=Refine(thoughts=4), evaluator="heuristic")
    assert (solution.answer, solution.solved, cancelled) == ("dog", True, ["cat"])


@pytest.mark.parametrize(
    ("reproducible", "order", "steps"),
    [(False, ["cow", "cow", "dot", "cat"], 1 + 3), (True, ["cow", "cow", "cat", "dot"], 1 + 3)],
)
def test_reproducible_drafts_keep_their_order(scripted: Any, reproducible: bool, order: list[str], steps: int) -> None:
    class Reversed(Staggered):
        depth = 2
        delay = -20

    selected: list[list[Any]] = []
    hooks = {"on_select": lambda search, nodes: selected.append(nodes) or nodes}
    decoder = scripted({"try q": ["cow", "cat", "dot"]})
    options = {"search": Refine(thoughts=3), "evaluator": "heuristic", "reproducible": reproducible}
    tree = solve(Reversed, "q", decoder=decoder, hooks=hooks, **options).tree
    assert [text for text, _ in texts(tree)] == order
    assert len(selected) == steps


class Compares:
    compares = True

    def key(self, ctx: Any, node: Any) -> None:
        return None

    async def evaluate(self, ctx: Any, nodes: Any) -> list[float]:
        return [ctx.heuristic(node) for node in nodes]


class Capitals(Sample):
    async def propose(self, ctx: Any, nodes: Any, count: int | None) -> Any:
        return await super().propose(ctx, nodes, count)


@pytest.mark.parametrize(("generator", "evaluator"), [(Capitals(), "heuristic"), (Sample(), Compares())])
def test_own_generators_and_comparisons_get_all_drafts_at_once(scripted: Any, generator: Any, evaluator: Any) -> None:
    decoder = scripted({"try q": ["cow", "cow", "cat", "dog"]})  # the second request has another seed
    options = {"search": Refine(thoughts=3), "generator": generator, "evaluator": evaluator}
    assert solve(Spell, "q", decoder=decoder, **options).answer == "dog"
    assert [request.sampling.n for request in decoder.requests] == [1, 3]


# -- ask and tell -----------------------------------------------------------------------------------------------


def test_a_thought_is_injected_inside_a_running_event_loop(scripted: Any) -> None:
    class Injects:
        def on_expand(self, search: Any, nodes: list[Any]) -> list[Any]:
            return [*nodes, search.inject(search.tree.root, "dog")]

    async def run() -> Any:
        return await asolve(Spell, "q", decoder=scripted({"try q": ["cat"]}), search=BFS(thoughts=1), hooks=Injects())

    solution = asyncio.run(run())
    assert (solution.answer, solution.solved) == ("dog", True)


def test_refine_repairs_no_pruned_draft(scripted: Any) -> None:
    class Prunes:
        def on_expand(self, search: Any, nodes: list[Any]) -> list[Any]:
            return [node for node in nodes if node.thought.text != "dot"]

    decoder = scripted({"try q": ["dot", "dot", "cat"], "mend cat, 3 wrong": ["dog"], "mend dot, 1 wrong": ["dog"]})
    solution = solve(Spell, "q", decoder=decoder, search=Refine(thoughts=1), evaluator="heuristic", hooks=Prunes())
    assert all("mend dot" not in prompt for batch in decoder.prompts for prompt in batch)
    assert solution.answer != "dot"
