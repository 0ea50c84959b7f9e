"""TextWorld: text adventures, played in the real thing (Côté et al., 2018; the extra `textworld`).

What a search does is done in copies of the game: one for each state that it came to lately, and those that were let go
of are played again from the beginning. A game goes the same way each time.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
import warnings
from collections import OrderedDict
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
_SHOWN = ("admissible_commands", "description", "facts", "inventory", "lost", "max_score", "objective", "score", "won")
_MOST = 64
_TURN = Lock()
_Game = tuple[int, int, int, int]
_COPIES: OrderedDict[tuple[_Game, tuple[str, ...]], tuple[Any, Any]] = OrderedDict()
"""Games in which these commands were played, and what they show, the last used last; nobody plays on in them."""


class TextWorld(Task):
    """Input: which game, as "rooms=3 objects=6 quest=4 seed=7". Output: the commands that win it, a list.

    A thought is one of the commands that the game allows, and acting on it plays it: the observation is what the game
    replies. T = 31: thirty commands. Score: 1 for commands that win. States are equal where the same facts hold, so a
    command that changes nothing leads nowhere.
    """

    name = "textworld"
    thought = ("action",)
    depth = 31
    search = "mcts:thoughts=none,iterations=50,rule=puct"
    generator = "enumerate"
    evaluator = "heuristic"

    def start(self, question: str) -> State:
        """The root state. Raises TaskError for what is no game, OptionError where TextWorld is not installed."""
        state = super().start(question)
        first = _played(_numbers(state.question))
        return state.model_copy(update={"world": {"goal": first["objective"], **_world(first)}})

    def variables(self, state: State) -> dict[str, Any]:
        world = _of(state)
        return {**super().variables(state), **{name: world[name] for name in ("goal", "scene", "carried", "commands")}}

    def parse_thought(self, template: str, text: str) -> str | None:
        """A command in one line, without the mark that it stands after."""
        return (text.strip().splitlines() or [""])[0].lstrip("> ").strip() or None

    async def act(self, state: State, thought: Thought) -> Observation:
        """Play a command, if it is one that the game allows: others may save files, or end it."""
        if thought.text not in self.actions(state):
            return Observation(text=f"You can't do that. You can: {'; '.join(self.actions(state))}.")
        played = (*(each.text for each in state.thoughts), thought.text)
        seen = await asyncio.to_thread(_played, _numbers(state.question), played)
        world = _world(seen)
        return Observation(text=_plain(seen.feedback), verified=bool(world["won"]), data=world)

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
        """The points that are still to be had."""
        return float(_of(state)["left"])

    def answer_at(self, state: State) -> list[str] | None:
        return [thought.text for thought in state.thoughts] if self.is_goal(state) else None

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """The game itself, in which the answer is played."""
        return self.question_of(row)

    def score(self, answer: Sequence[str] | None, reference: str) -> float:
        """1 for a list of commands that wins where it is played; each has to be allowed where it stands."""
        game, played = _numbers(reference), tuple[str, ...]()
        for command in answer or ():
            if command not in _played(game, played).admissible_commands:
                return 0.0
            played = (*played, command)
        return float(bool(_played(game, played).won))

    def instance(self, seed: int) -> dict[str, Any]:
        """A game of three rooms, six objects and a quest of four commands."""
        return {"question": f"rooms=3 objects=6 quest=4 seed={seed % 10**9}"}


def _of(state: State) -> dict[str, Any]:
    assert isinstance(state.world, dict)
    return state.world


def _numbers(question: str) -> _Game:
    """Rooms, objects, commands to win by, and seed."""
    found = _GAME.fullmatch(question.strip())
    if found is None or not all(int(number) for number in found.groups()[:3]):
        raise TaskError(f"{question[:80]!r} is no game: write one as 'rooms=3 objects=6 quest=4 seed=7'")
    rooms, objects, quest, seed = map(int, found.groups())
    return rooms, objects, quest, seed


def _world(seen: Any) -> dict[str, JsonValue]:
    """What a state of the game is to a search: what the player sees and may do, and a digest of all that is so."""
    facts = "\n".join(sorted(map(str, seen.facts)))
    return {
        "scene": _plain(seen.description),
        "carried": _plain(seen.inventory),
        "commands": list(seen.admissible_commands),
        "won": bool(seen.won),
        "lost": bool(seen.lost),
        "left": seen.max_score - seen.score,
        "facts": hashlib.sha256(facts.encode()).hexdigest(),
    }


def _plain(text: str) -> str:
    """A game's text without blank lines, its prompt and the line of its state."""
    lines = (line.strip(" >") for line in text.splitlines())
    return "\n".join(line for line in lines if line and not _STATUS.fullmatch(line))


def _played(game: _Game, commands: tuple[str, ...] = ()) -> Any:
    """What a game shows after these commands."""
    with _TURN:
        if not commands:
            return _begun(game)[1]
        if (game, commands) not in _COPIES:
            known = next((n for n in range(len(commands) - 1, 0, -1) if (game, commands[:n]) in _COPIES), 0)
            world, _ = _COPIES[game, commands[:known]] if known else _begun(game)
            world = world.copy()
            for command in commands[known:]:
                seen, *_ = world.step(command)
            _COPIES[game, commands] = world, seen
        _COPIES.move_to_end((game, commands))
        if len(_COPIES) > _MOST:
            _COPIES.popitem(last=False)
        return _COPIES[game, commands][1]


@lru_cache(_MOST)
def _begun(game: _Game) -> tuple[Any, Any]:
    try:
        import textworld
    except ImportError as error:
        raise OptionError(f"TextWorld is not installed ({error}): pip install textworld") from None
    warnings.filterwarnings("ignore", "Game .* is not fully supported")  # of jericho: what TextWorld sees to itself
    options = textworld.GameOptions()
    options.grammar.only_last_action = True  # what is to be found out on the way is not said
    options.nb_rooms, options.nb_objects, options.quest_length, options.seeds = game
    options.path = str(Path(_folder().name) / f"{'-'.join(map(str, game))}.z8")
    try:
        path = textworld.generator.compile_game(textworld.generator.make_game(options), options)
    except Exception as error:  # whatever it is that its makers and compilers raise
        raise TaskError(f"TextWorld can't make this game ({str(error)[:200]}): ask for a smaller one") from error
    world = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(_SHOWN, True)))
    return world, world.reset()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the files of games are, which every copy of one reads."""
    return tempfile.TemporaryDirectory(prefix="textworld-")
