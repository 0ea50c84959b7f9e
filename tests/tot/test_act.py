"""The act search follows one path of actions to the goal."""

from __future__ import annotations

from typing import Any, ClassVar

from tot import Observation, State, Task, Thought, solve


class Rooms(Task):
    """Three rooms in a row, with the goal in the third. The last observation names the current room."""

    templates: ClassVar = {"move": "door {{ observations | join(', ') }}"}
    thought = ("move",)
    depth = 6

    async def act(self, state: State, thought: Thought) -> Observation:
        room = (state.world or 0) + {"on": 1, "back": -1, "look": 0}[thought.text]  # type: ignore[operator]
        return Observation(text=f"room {room}", verified=room == 2, data=room)

    def step(self, state: State, thought: Thought) -> State:
        assert thought.observation is not None
        return state.then(thought, thought.observation.data)

    def is_terminal(self, state: State) -> bool:
        return state.world == 2

    def answer_at(self, state: State) -> str | None:
        return " ".join(thought.text for thought in state.thoughts)


def test_act_follows_one_path_to_the_goal(scripted: Any) -> None:
    prompts = ["door", "door room 1", "door room 1, room 0", "door room 1, room 0, room 0"]
    replies = dict(zip([*prompts, f"{prompts[-1]}, room 1"], ["on", "back", "look", "on", "on"], strict=True))
    solution = solve(Rooms, "q", decoder=scripted(replies), search="act")
    assert (solution.answer, solution.solved, solution.calls) == ("on back look on on", True, 5)


def test_act_ends_at_full_depth_and_without_actions(scripted: Any) -> None:
    solution = solve(Rooms, "q", decoder=scripted({}), search="act", generator=Always("look"), evaluator="random")
    assert (len(solution.tree) - 1, solution.solved) == (5, False)
    solution = solve(Rooms, "q", decoder=scripted({}), search="act", generator=Always(None), evaluator="random")
    assert len(solution.tree) == 1


class Always:
    def __init__(self, move: str | None) -> None:
        self.moves = [] if move is None else [move]

    async def propose(self, ctx: Any, nodes: Any, count: int | None) -> list[list[str]]:
        return [list(self.moves) for _ in nodes]
