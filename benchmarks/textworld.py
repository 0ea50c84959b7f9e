"""TextWorld: text adventures, played in the original engine (Côté et al., 2018; the extra `textworld`).

A search plays in copies of the game, one for each recent state. Older states are replayed from the start. Games are
deterministic.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
import warnings
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import JsonValue

from tot.decoders.errors import OptionError, TaskError
from tot.task.task import Task
from tot.tree.thought import Observation, State, Thought

_GAME = re.compile(r"rooms=([0-9]{1,2}) objects=([0-9]{1,2}) quest=([0-9]{1,2}) seed=([0-9]{1,9})")
_STATUS = re.compile(r"-=.{0,80}=- ?\d+/\d+")
_INFOS = ("admissible_commands", "description", "facts", "inventory", "lost", "max_score", "objective", "score", "won")
_MOST = 64
_LOCK = Lock()
_Game = tuple[int, int, int, int]


class TextWorld(Task):
    """Input: the parameters of a game, "rooms=3 objects=6 quest=4 seed=7". Output: a list of commands that wins it.

    A thought is a command that the game allows. `act` plays it, and the observation is the reply of the game. T = 31:
    thirty commands. Score: 1 for commands that win. States with the same facts are equal, so a command without effect
    is a duplicate.
    """

    name = "textworld"
    thought = ("action",)
    depth = 31
    search = "mcts:thoughts=none,iterations=50,rule=puct"
    generator = "enumerate"
    evaluator = "heuristic"

    def start(self, question: str) -> State:
        """Return the root state. Raises TaskError for an invalid game, OptionError if TextWorld is not installed."""
        state = super().start(question)
        first = _replayed(_numbers(state.question))
        return state.model_copy(update={"world": {"goal": first["objective"], **_world(first)}})

    def variables(self, state: State) -> dict[str, Any]:
        world = _of(state)
        return {**super().variables(state), **{name: world[name] for name in ("goal", "scene", "carried", "commands")}}

    def parse_thought(self, template: str, text: str) -> str | None:
        """Return the first line as a command, without the prompt character `>`."""
        return (text.strip().splitlines() or [""])[0].lstrip("> ").strip() or None

    async def act(self, state: State, thought: Thought) -> Observation:
        """Play a command if the game allows it: other commands may save files or quit."""
        if thought.text not in self.actions(state):
            return Observation(text=f"You can't do that. You can: {'; '.join(self.actions(state))}.")
        commands = (*(previous.text for previous in state.thoughts), thought.text)
        result = await asyncio.to_thread(_replayed, _numbers(state.question), commands)
        world = _world(result)
        return Observation(text=_plain(result.feedback), verified=bool(world["won"]), data=world)

    def actions(self, state: State) -> Sequence[str]:
        return list(_of(state)["commands"])

    def step(self, state: State, thought: Thought) -> State | None:
        if thought.observation is None or not isinstance(thought.observation.data, dict):
            return None
        return state.then(thought, {**_of(state), **thought.observation.data})

    def key(self, state: State) -> Hashable:
        return str(_of(state)["facts"])

    def is_terminal(self, state: State) -> bool:
        return bool(_of(state)["won"] or _of(state)["lost"])

    def is_goal(self, state: State) -> bool:
        return bool(_of(state)["won"])

    def heuristic(self, state: State) -> float:
        """Return the points that are still missing."""
        return float(_of(state)["left"])

    def answer_at(self, state: State) -> list[str] | None:
        return [thought.text for thought in state.thoughts] if self.is_goal(state) else None

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the game, in which `score` plays the answer."""
        return self.question_of(row)

    def score(self, answer: Sequence[str] | None, reference: str) -> float:
        """Return 1 if the commands win the game and each one is allowed when it is played, otherwise 0."""
        game, commands = _numbers(reference), tuple[str, ...]()
        for command in answer or ():
            if command not in _replayed(game, commands).admissible_commands:
                return 0.0
            commands = (*commands, command)
        return float(bool(_replayed(game, commands).won))

    def instance(self, seed: int) -> dict[str, Any]:
        """Return a game with three rooms, six objects and a quest of four commands."""
        return {"question": f"rooms=3 objects=6 quest=4 seed={seed % 10**9}"}


def _of(state: State) -> dict[str, Any]:
    assert isinstance(state.world, dict)
    return state.world


def _numbers(question: str) -> _Game:
    """Parse the number of rooms and objects, the length of the quest and the seed."""
    match = _GAME.fullmatch(question.strip())
    if match is None or not all(int(number) for number in match.groups()[:3]):
        raise TaskError(f"{question[:80]!r} is not a game: write 'rooms=3 objects=6 quest=4 seed=7'")
    rooms, objects, quest, seed = map(int, match.groups())
    return rooms, objects, quest, seed


def _world(infos: Any) -> dict[str, JsonValue]:
    """Return the world of a state: the player's view, the allowed commands, and a digest of all facts."""
    facts = "\n".join(sorted(map(str, infos.facts)))
    return {
        "scene": _plain(infos.description),
        "carried": _plain(infos.inventory),
        "commands": list(infos.admissible_commands),
        "won": bool(infos.won),
        "lost": bool(infos.lost),
        "left": infos.max_score - infos.score,
        "facts": hashlib.sha256(facts.encode()).hexdigest(),
    }


def _plain(text: str) -> str:
    """Return a game's text without blank lines, its prompt and its status line."""
    lines = (line.strip(" >") for line in text.splitlines())
    return "\n".join(line for line in lines if line and not _STATUS.fullmatch(line))


def _replayed(game: _Game, commands: tuple[str, ...] = ()) -> Any:
    """Return the output of a game after these commands."""
    with _LOCK:
        return _played(game, commands)[1]


@lru_cache(_MOST)
def _played(game: _Game, commands: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a game after some commands, and its output. A search continues in a copy of a recent game."""
    if not commands:
        return _begun(game)
    world = _played(game, commands[:-1])[0].copy()
    return world, world.step(commands[-1])[0]


@lru_cache(_MOST)
def _begun(game: _Game) -> tuple[Any, Any]:
    try:
        import textworld
    except ImportError as error:
        raise OptionError(f"TextWorld is not installed ({error}): pip install textworld") from None
    warnings.filterwarnings("ignore", "Game .* is not fully supported")  # jericho's; TextWorld handles this itself
    options = textworld.GameOptions()
    options.grammar.only_last_action = True  # the objective does not reveal intermediate steps
    options.nb_rooms, options.nb_objects, options.quest_length, options.seeds = game
    options.path = str(Path(_folder().name) / f"{'-'.join(map(str, game))}.z8")
    try:
        path = textworld.generator.compile_game(textworld.generator.make_game(options), options)
    except Exception as error:  # the generator and the compiler raise exceptions of any type
        raise TaskError(f"TextWorld cannot generate this game ({str(error)[:200]}): use a smaller one") from error
    world = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(_INFOS, True)))
    return world, world.reset()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the game files, which all copies of a game read."""
    return tempfile.TemporaryDirectory(prefix="textworld-")
