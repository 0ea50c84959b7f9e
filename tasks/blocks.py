"""The world of Blocksworld: one hand, a table, and blocks that are picked up, put down, stacked and unstacked.

Implements the 4-operator STRIPS domain: legal actions, plan validation and parsing of actions. It does not plan, and
knows nothing of tasks, prompts or models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from tot.decoders.errors import TaskError

Fact = tuple[str, ...]
"""A predicate and its blocks, such as ("on", "a", "b")."""
Facts = frozenset[Fact]
"""A state of the world: the true facts. All others are false."""

RESERVED = frozenset(
    "the block blocks on onto off top of from table up down and is hand holds empty clear".split()  # noqa: SIM905
)
"""Words in the text of actions and facts, which cannot be names of blocks."""
_WORDS = {
    "on": "{} is on {}",
    "ontable": "{} is on the table",
    "holding": "the hand holds {}",
    "handempty": "the hand is empty",
    "clear": "{} is clear",
}
"""Each kind of fact in words."""
_NAME = re.compile(r"[a-z][a-z0-9_-]*+")

_REASON = re.compile(
    r"\s(?:[-–—]+>?|[=→⇒]>?|//|#|because|since|so|as|to|in order|for|which|that|while|where|thus|thereby"
    r"|freeing|making|leaving)(?=\s)|:\s",
    re.IGNORECASE,
)
_VERBS = {"unstacking": "unstack", "stacking": "stack", "picking": "pick"} | dict.fromkeys(
    ("putting", "place", "placing"), "put"
)
_VERBS |= dict.fromkeys(("pick_up", "pickup"), "pick-up") | dict.fromkeys(("put_down", "putdown"), "put-down")

TABLE = ""
"""The place of a block that is on no other block."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks, initial facts and goal facts. All other facts are initially false."""

    objects: tuple[str, ...]
    init: Facts
    goal: Facts


@dataclass(frozen=True, slots=True)
class Action:
    """One of pick-up, put-down, stack and unstack, and its one or two blocks."""

    name: str
    blocks: tuple[str, ...]

    @property
    def pddl(self) -> str:
        """The action as PDDL, such as "(unstack b c)"."""
        return f"({' '.join((self.name, *self.blocks))})"

    @property
    def text(self) -> str:
        """The action in words, such as "unstack b from c"."""
        joint = {"stack": " on ", "unstack": " from "}.get(self.name, "")
        return f"{self.name.replace('-', ' ')} {joint.join(self.blocks)}"


def changes(action: Action) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """Return the preconditions of an action, which it makes false, and the facts that it makes true."""
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
    """Return the legal actions, in alphabetical order of the blocks; put-down comes before stack."""
    clear = sorted(fact[1] for fact in facts if fact[0] == "clear")
    held = [fact[1] for fact in facts if fact[0] == "holding"]
    if held:
        return [Action("put-down", (held[0],)), *(Action("stack", (held[0], under)) for under in clear)]
    on = places(facts)
    return [Action("unstack", (x, on[x])) if on[x] else Action("pick-up", (x,)) for x in clear]


def apply(facts: Facts, action: Action) -> Facts | None:
    """Return the facts after an action; None if the action is illegal."""
    needs, adds = changes(action)
    return facts.difference(needs).union(adds) if facts.issuperset(needs) else None


def say(fact: Fact) -> str:
    """Return a fact in words, such as "a is on b"."""
    return _WORDS[fact[0]].format(*fact[1:])


def read_fact(text: str) -> Fact | None:
    """Parse a fact that `say` writes; None for other text."""
    matches = ((kind, re.fullmatch(words.replace("{}", r"(\S++)"), text)) for kind, words in _WORDS.items())
    return next(((kind, *match.groups()) for kind, match in matches if match), None)


def sentence(facts: Facts) -> str:
    """Return facts in words: the places of blocks, then the hand, then the clear blocks."""
    return ", ".join(say(fact) for kind in _WORDS for fact in sorted(facts) if fact[0] == kind)


def places(facts: Facts) -> dict[str, str]:
    """Return the place of each block: `TABLE` or another block. A block in the hand is omitted."""
    return {fact[1]: fact[2] if fact[0] == "on" else TABLE for fact in facts if fact[0] in ("on", "ontable")}


def parse_action(text: str) -> Action | None:
    """Parse an action, as PDDL or in free wording; None if the text is not an action.

    "(unstack b c)", "Unstack the b block from on top of block c." and "pick b up" are actions. A reason after the
    action ("because", "to", "-") is ignored. Takes linear time.
    """
    if (action := _parse(text)) is not None:
        return action
    reason = _REASON.search(text)
    return _parse(text[: reason.start()]) if reason else None


def _parse(text: str) -> Action | None:
    words = [word.strip("`'\"*:!.[]{}") for word in re.findall(r"[^\s(),]++", text.lower())]
    words = [word for word in words if word and word not in ("the", "block")]
    words[:1] = [_VERBS.get(word, word) for word in words[:1]]
    at_table = words[-1:] == ["table"] and words[-2:-1] in (["from"], ["off"], ["on"], ["onto"])
    match words[:-2] if at_table else words:
        case ["pick-up", block]:
            return _action("pick-up", [block])
        case ["put-down", block]:
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


def _action(name: str, *arguments: Sequence[str]) -> Action | None:
    # Drop an article before a name; "a" alone is a name.
    blocks = [words[1] if len(words) == 2 and words[0] in ("a", "an") else " ".join(words) for words in arguments]
    return None if any(check_name(block) for block in blocks) else Action(name, tuple(blocks))


def _split(words: list[str], *joints: str) -> tuple[list[str], list[str]]:
    """Split the words at the first of `joints`; two words alone are two blocks."""
    if len(words) == 2:
        return words[:1], words[1:]
    joint = next((index for index, word in enumerate(words) if word in joints), len(words))
    return words[:joint], [word for word in words[joint + 1 :] if word not in ("on", "top", "of")]


def check(problem: Problem) -> None:
    """Raise TaskError with the reason if the names, the initial state or the goal of a problem are invalid.

    Every consistent goal can be reached: put all blocks on the table, then build it.
    """
    if not problem.objects:
        raise TaskError("there are no blocks: name at least one")
    for index, block in enumerate(problem.objects):
        if why := "named twice: remove one" if block in problem.objects[:index] else check_name(block):
            raise TaskError(f"block {short(block)!r}: {why}")
    for fact in sorted(problem.init | problem.goal):
        if unknown := [block for block in fact[1:] if block not in problem.objects]:
            raise TaskError(f"{short(say(fact))!r}: there is no block {short(unknown[0])!r}: name it, or use another")
    if why := _contradiction(problem.init) or next(_gaps(problem.objects, problem.init), None):
        raise TaskError(f"the initial state is invalid: {why}: correct the facts of the start")
    if why := _contradiction(problem.goal):
        raise TaskError(f"this problem cannot be solved: {why}: correct the goal")


def check_name(name: str) -> str | None:
    """Return why a word cannot be the name of a block; None if it can."""
    if not _NAME.fullmatch(name):
        return "not a name: start with a letter, followed by letters, digits, '-' or '_'"
    return "a reserved word: give the block another name" if name in RESERVED else None


def short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _contradiction(facts: Facts) -> str | None:
    """Describe two facts that exclude each other, or a cycle of blocks; None if the facts are consistent."""
    where: dict[str, Fact] = {}  # fact about the place of each block
    tops: dict[str, Fact] = {}  # fact about the top of each block, or "" for the hand
    for fact in sorted(facts, reverse=True):  # places first
        kind, *blocks = fact
        claims: list[tuple[dict[str, Fact], str]] = []
        if kind in ("on", "ontable", "holding"):
            claims.append((where, blocks[0]))
        if kind in ("on", "clear", "holding"):  # nothing is on a held block, and it is not clear
            claims.append((tops, blocks[-1]))
        if kind in ("holding", "handempty"):
            claims.append((tops, ""))
        for known, subject in claims:
            if other := known.get(subject):
                return f"{say(other)} and {say(fact)} exclude each other"
            known[subject] = fact
    on = {x: fact[2] for x, fact in where.items() if fact[0] == "on"}
    try:
        TopologicalSorter({upper: [lower] for upper, lower in on.items()}).prepare()
    except CycleError as error:
        cycle = error.args[1][:0:-1]
        return f"{', '.join(cycle)} are stacked in a cycle" if cycle[1:] else f"{cycle[0]} is on itself"
    return None


def _gaps(objects: Iterable[str], facts: Facts) -> Iterator[str]:
    """Yield descriptions of the facts that consistent facts lack for a complete state."""
    with_place = {fact[1] for fact in facts if fact[0] in ("on", "ontable", "holding")}
    with_top = {fact[-1] for fact in facts if fact[0] in ("on", "clear", "holding")}
    for block in objects:
        if block not in with_place:
            yield f"{block} has no place (on a block, on the table or in the hand)"
        if block not in with_top:
            yield f"nothing is on {block}, but (clear {block}) is missing"
    if not any(fact[0] in ("holding", "handempty") for fact in facts):
        yield "the hand holds nothing, but (handempty) is missing"


def solves(problem: Problem, plan: Sequence[str]) -> bool:
    """Return True if each step of a plan, as PDDL or in words, is legal and the last one reaches the goal."""
    facts: Facts | None = problem.init
    for step in plan:
        action = parse_action(step)
        facts = apply(facts, action) if facts is not None and action is not None else None
    return facts is not None and problem.goal <= facts
