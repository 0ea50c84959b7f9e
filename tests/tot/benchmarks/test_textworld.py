"""TextWorld: commands executed in real games."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.textworld import TextWorld, _begun, _played
from tot import Checkpoint, State, Thought, solve
from tot.cli.app import main
from tot.decoders.errors import OptionError, TaskError

pytest.importorskip("textworld")
TASK = f"{Path(__file__).parents[3] / 'benchmarks' / 'textworld.py'}:TextWorld"
GAME = "rooms=2 objects=4 quest=3 seed=5"
BY_CHANCE = {"model": None, "generator": "enumerate:prior=random", "evaluator": "heuristic"}


@pytest.fixture(scope="module")
def task() -> TextWorld:
    return TextWorld()


@pytest.fixture(scope="module")
def won(task: TextWorld) -> list[str]:
    """Commands that win the game, found by exhaustive search."""
    solution = solve(task, GAME, search="bfs:thoughts=none,breadth=100,select=all", **BY_CHANCE)
    assert solution.solved
    return list(solution.answer)


def after(task: TextWorld, state: State, *commands: str) -> State:
    for command in commands:
        thought = Thought(parts={"action": command})
        observation = asyncio.run(task.act(state, thought))
        step = task.step(state, thought.model_copy(update={"observation": observation}))
        assert step is not None, observation.text
        state = step
    return state


def test_winning_commands_win_again_in_a_fresh_game(task: TextWorld, won: list[str]) -> None:
    _played.cache_clear()
    _begun.cache_clear()
    state = after(task, task.start(GAME), *won)
    assert task.is_goal(state)
    assert (task.answer_at(state), task.score(won, GAME)) == (won, 1.0)


def test_evicted_copies_of_the_game_are_replayed(task: TextWorld, won: list[str]) -> None:
    last = after(task, task.start(GAME), *won[:-1])
    _played.cache_clear()
    assert task.is_goal(after(task, last, won[-1]))


def test_a_win_needs_the_last_command(task: TextWorld, won: list[str]) -> None:
    assert not task.is_terminal(after(task, task.start(GAME), *won[:-1]))
    assert task.score(won[:-1], GAME) == 0


@pytest.mark.parametrize("answer", [None, [], ["save game"], ["fly to the moon"]])
def test_an_answer_that_does_not_win_scores_0(task: TextWorld, answer: list[str] | None) -> None:
    assert task.score(answer, GAME) == 0


def test_branches_are_independent(task: TextWorld, won: list[str]) -> None:
    root = task.start(GAME)
    for command in task.actions(root):
        after(task, root, command)
    assert task.is_goal(after(task, root, *won))
    assert task.start(GAME) == root


def test_a_command_without_effect_leads_to_an_equal_state(task: TextWorld, won: list[str]) -> None:
    root = task.start(GAME)
    assert task.key(after(task, root, "look")) == task.key(root)
    assert task.key(after(task, root, won[0])) != task.key(root)


@pytest.mark.parametrize("command", ["save", "restore", "quit", "fly to the moon", "look\nquit", "\x00", "é" * 5000])
def test_only_commands_that_the_game_allows_are_executed(task: TextWorld, command: str) -> None:
    root = task.start(GAME)
    thought = Thought(parts={"action": command})
    observation = asyncio.run(task.act(root, thought))
    assert observation.text.startswith("You can't do that. You can: ")
    assert task.step(root, thought.model_copy(update={"observation": observation})) is None


def test_prompts_contain_the_commands_and_their_results(task: TextWorld, won: list[str]) -> None:
    (user, prefix) = task.prompt("action", after(task, task.start(GAME), "inventory"))
    assert "> inventory\nYou are carrying" in user.content
    assert all(command in user.content for command in won[:1])
    assert (prefix.role, prefix.content) == ("assistant", ">")


def test_a_resumed_search_executes_no_command_twice(task: TextWorld, won: list[str], tmp_path: Path) -> None:
    class Counting(TextWorld):
        played = 0

        async def act(self, state: State, thought: Thought):  # type: ignore[no-untyped-def]
            type(self).played += 1
            return await super().act(state, thought)

    search = {**BY_CHANCE, "search": "bfs:thoughts=4,breadth=4,depth=4"}
    with closing(Checkpoint.create(tmp_path / "run.jsonl")) as run:
        first = solve(Counting(), GAME, checkpoint=run, **search)
    played = Counting.played
    with closing(Checkpoint.resume(tmp_path / "run.jsonl")) as run:
        again = solve(Counting(), GAME, checkpoint=run, **search)
    assert Counting.played == played > 0
    assert again.tree.to_json() == first.tree.to_json()


@pytest.mark.parametrize("question", ["Find the key", "rooms=0 objects=4 quest=3 seed=5", "rooms=2 objects=4 quest=3"])
def test_an_invalid_game_is_rejected(task: TextWorld, question: str) -> None:
    with pytest.raises(TaskError, match="is not a game: write 'rooms=3"):
        task.start(question)


def test_a_game_that_cannot_be_made_is_rejected(task: TextWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(game: object, options: object) -> None:
        raise RuntimeError("Too much text in quotation marks")

    monkeypatch.setattr("textworld.generator.compile_game", fails)
    with pytest.raises(
        TaskError, match=r"cannot generate this game \(Too much text in quotation marks\): use a smaller"
    ):
        task.start("rooms=2 objects=4 quest=3 seed=78")


def test_without_textworld_the_error_says_how_to_install_it(task: TextWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(OptionError, match="pip install textworld"):
        task.start("rooms=2 objects=4 quest=3 seed=77")


def test_games_are_generated_from_seeds(task: TextWorld, tmp_path: Path) -> None:
    assert main(["instances", TASK, "--count", "2", "--seed", "7", "--out", str(tmp_path / "games.jsonl")]) == 0
    games = [json.loads(line)["question"] for line in (tmp_path / "games.jsonl").read_text().splitlines()]
    assert len(set(games)) == 2
    assert task.start(games[0]).world != task.start(games[1]).world
