"""The world of Blocksworld: one hand, a table, and blocks that are picked up, put down, stacked and unstacked.

The 4-operator STRIPS domain: what is possible, whether a plan is right, and actions read from text.
Knows nothing of tasks, prompts or models, and finds no plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tot.decoders.errors import TaskError
from tot.tasks.pddl import Fact, Problem, check_name

Facts = frozenset[Fact]
"""A state of the world: the facts that are true. All others are false."""

_REASON = re.compile(
    r"\s(?:[-–—]+>?|[=→⇒]>?|//|#|because|since|so|as|to|in order|for|which|that|while|where|thus|thereby"
    r"|freeing|making|leaving)(?=\s)|:\s",
    re.IGNORECASE,
)
_VERBS = {"unstacking": "unstack", "stacking": "stack", "picking": "pick"} | dict.fromkeys(
    ("putting", "place", "placing"), "put"
)

TABLE = ""
"""The place of a block that stands on no block."""


@dataclass(frozen=True, slots=True)
class Action:
    """One of pick-up, put-down, stack and unstack, and the one or two blocks that it is about."""

    name: str
    blocks: tuple[str, ...]

    @property
    def pddl(self) -> str:
        """As in "(unstack b c)"."""
        return f"({' '.join((self.name, *self.blocks))})"

    @property
    def text(self) -> str:
        """As in "unstack b from c"."""
        joint = {"stack": " on ", "unstack": " from "}.get(self.name, "")
        return f"{self.name.replace('-', ' ')} {joint.join(self.blocks)}"


def changes(action: Action) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """The facts that an action needs and makes false, and the facts that it makes true."""
    x, y = action.blocks[0], action.blocks[-1]
    match action.name:
        case "pick-up":
            return (("ontable", x), ("clear", x), ("handempty",)), (("holding", x),)
        case "put-down":
            return (("holding", x),), (("ontable", x), ("clear", x), ("handempty",))
        case "stack":
            return (("holding", x), ("clear", y)), (("on", x, y), ("clear", x), ("handempty",))
        case "unstack":
            return (("on", x, y), ("clear", x), ("handempty",)), (("holding", x), ("clear", y))
    raise TaskError(f"unknown action {action.name!r}: use pick-up, put-down, stack or unstack")


def legal_actions(facts: Facts) -> list[Action]:
    """What can be done, in alphabetical order of the blocks; putting down comes before stacking."""
    clear = sorted(fact[1] for fact in facts if fact[0] == "clear")
    held = [fact[1] for fact in facts if fact[0] == "holding"]
    if held:
        return [Action("put-down", (held[0],)), *(Action("stack", (held[0], under)) for under in clear)]
    on = places(facts)
    return [Action("unstack", (x, on[x])) if on[x] else Action("pick-up", (x,)) for x in clear]


def apply(facts: Facts, action: Action) -> Facts | None:
    """The facts after an action; None where it is not possible."""
    needs, adds = changes(action)
    return facts.difference(needs).union(adds) if facts.issuperset(needs) else None


def say(fact: Fact) -> str:
    """A fact in words, such as "a is on b"."""
    match fact:
        case ("on", x, y):
            return f"{x} is on {y}"
        case ("ontable", x):
            return f"{x} is on the table"
        case ("holding", x):
            return f"the hand holds {x}"
        case ("clear", x):
            return f"{x} is clear"
    return "the hand is empty"


def places(facts: Facts) -> dict[str, str]:
    """What each block stands on, `TABLE` or another; a block in the hand stands on nothing, and is left out."""
    return {fact[1]: fact[2] if fact[0] == "on" else TABLE for fact in facts if fact[0] in ("on", "ontable")}


def parse_action(text: str) -> Action | None:
    """The action that a text is, as PDDL or in words, loosely written; None where it is none.

    "(unstack b c)", "Unstack the b block from on top of block c." and "pick b up" are actions; a reason after one
    ("because", "to", "-") is left out. Takes linear time.
    """
    if (action := _parse(text)) is not None:
        return action
    reason = _REASON.search(text)
    return _parse(text[: reason.start()]) if reason else None


def _parse(text: str) -> Action | None:
    words = [word.strip("`'\"*:!.[]") for word in re.findall(r"[^\s(),]++", text.lower())]
    words = [word for word in words if word and word not in ("the", "block")]
    words[:1] = [_VERBS.get(word, word) for word in words[:1]]
    at_table = words[-1:] == ["table"] and words[-2:-1] in (["from"], ["off"], ["on"], ["onto"])
    match words[:-2] if at_table else words:
        case ["pick-up" | "pickup", block]:
            return _action("pick-up", [block])
        case ["put-down" | "putdown", block]:
            return _action("put-down", [block])
        case ["pick", "up", *rest] | ["pick", *rest, "up"]:
            return _action("pick-up", rest)
        case ["put", "down", *rest] | ["put", *rest, "down"]:
            return _action("put-down", rest)
        case ["put", *rest] if at_table:
            return _action("put-down", rest)
        case ["put", _, "on" | "onto" | "upon" | "atop", *_] if not at_table:
            return _action("stack", *_split(words[1:], "on", "onto", "upon", "atop"))
        case ["stack", *rest] if not at_table:
            return _action("stack", *_split(rest, "on", "onto", "upon", "atop"))
        case ["unstack", *rest] if not at_table:
            return _action("unstack", *_split(rest, "from", "off"))
    return None


def _action(name: str, *written: Sequence[str]) -> Action | None:
    # An article before a name is dropped; "a" alone is a name.
    blocks = [words[1] if len(words) == 2 and words[0] in ("a", "an") else " ".join(words) for words in written]
    return None if any(check_name(block) for block in blocks) else Action(name, tuple(blocks))


def _split(words: list[str], *joints: str) -> tuple[list[str], list[str]]:
    """What stands before and after the first of `joints`; two words alone are two blocks."""
    if len(words) == 2:
        return words[:1], words[1:]
    place = next((index for index, word in enumerate(words) if word in joints), len(words))
    return words[:place], [word for word in words[place + 1 :] if word not in ("on", "top", "of")]


def check(problem: Problem) -> None:
    """Raises TaskError where the facts at the start are not a state of the world, naming what is wrong with them."""
    facts = problem.init
    why = _contradiction(facts) or next(_gaps(problem.objects, facts), None)
    if why:
        raise TaskError(f"the start is not possible: {why}: correct the facts of :init")


def unreachable(problem: Problem) -> str | None:
    """Why no plan can reach the goal; None where one can.

    A goal that doesn't contradict itself can always be reached: put all blocks on the table, and build it up.
    """
    known = set(problem.objects)
    if unknown := sorted({block for fact in problem.goal for block in fact[1:]} - known):
        return f"there is no block {unknown[0]}"
    return _contradiction(problem.goal)


def _contradiction(facts: Facts) -> str | None:
    """Two facts that exclude each other, or a circle of blocks, in words; None where all can be true together."""
    where: dict[str, Fact] = {}  # by block
    tops: dict[str, Fact] = {}  # what is said of the top of a block, or of the hand
    for fact in sorted(facts, reverse=True):  # places first
        kind, *blocks = fact
        taken: list[tuple[dict[str, Fact], str]] = []
        if kind in ("on", "ontable", "holding"):
            taken.append((where, blocks[0]))
        if kind in ("on", "clear", "holding"):  # nothing is on a block that is held, and it isn't clear
            taken.append((tops, blocks[-1]))
        if kind in ("holding", "handempty"):
            taken.append((tops, ""))
        for said, about in taken:
            if other := said.get(about):
                return f"{say(other)} and {say(fact)} exclude each other"
            said[about] = fact
    on = {x: fact[2] for x, fact in where.items() if fact[0] == "on"}
    safe: set[str] = set()
    for start in on:
        path = []
        block = start
        while block in on and block not in safe:
            safe.add(block)
            path.append(block)
            block = on[block]
        if block in path:
            circle = path[path.index(block) :]
            return f"{', '.join(circle)} stand on each other in a circle" if circle[1:] else f"{block} is on itself"
    return None


def _gaps(objects: Iterable[str], facts: Facts) -> Iterator[str]:
    """What a whole state would have to say, and these facts, which don't contradict each other, leave out."""
    placed = {fact[1] for fact in facts if fact[0] in ("on", "ontable", "holding")}
    topped = {fact[-1] for fact in facts if fact[0] in ("on", "clear", "holding")}
    for block in objects:
        if block not in placed:
            yield f"{block} has no place, on a block, on the table or in the hand"
        if block not in topped:
            yield f"nothing is on {block}, but (clear {block}) is missing"
    if not any(fact[0] in ("holding", "handempty") for fact in facts):
        yield "the hand holds nothing, but (handempty) is missing"


def solves(problem: Problem, plan: Sequence[str]) -> bool:
    """Whether each step of a plan, in PDDL or in words, can be done, and the goal is reached after the last."""
    facts: Facts | None = problem.init
    for step in plan:
        action = parse_action(step)
        facts = apply(facts, action) if facts is not None and action is not None else None
    return facts is not None and problem.goal <= facts
