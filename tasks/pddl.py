"""Blocksworld problems as PDDL: read into objects, facts and a goal.

The reader takes what problems of the 4-operator domain use: objects (typed or not), positive facts, and a goal that is
a fact or a conjunction. All else is refused by line and name. Knows nothing of actions or of what is possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tot.decoders.errors import TaskError

Fact = tuple[str, ...]
"""A predicate and its blocks, such as ("on", "a", "b")."""

ARITY = {"on": 2, "ontable": 1, "clear": 1, "handempty": 0, "holding": 1}
_ALIASES = {
    **dict.fromkeys(("armempty", "emptyhand", "emptyarm", "handfree", "gripperempty"), "handempty"),
    "inhand": "holding",
}
"""Other domains' names of predicates, without hyphens."""
RESERVED = frozenset(
    "the block blocks on onto off top of from table up down and is hand holds empty clear".split()  # noqa: SIM905
)
"""Words of actions and facts written as text: no block may be called so."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*+")
_TOKEN = re.compile(r"[()]|[^\s()]++")
_TYPES = ("block", "object")
_CONNECTIVES = ("and", "not", "or", "imply", "forall", "exists", "when", "=")
_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks, the facts at the start, and the facts to reach. All other facts are false at the start."""

    objects: tuple[str, ...]
    init: frozenset[Fact]
    goal: frozenset[Fact]


def read_problem(text: str) -> Problem:
    """The problem that a PDDL text defines; letter case does not matter, `;` begins a comment.

    Raises TaskError naming the line and the piece of text that is wrong.
    """
    sections = _sections(_tree(text))
    objects = _objects(sections[":objects"])
    known = frozenset(objects)
    goal = sections[":goal"]
    if len(goal.items) != 2:
        raise _wrong(goal, "the goal is not one fact or one (and ...): give one")
    conjunction = goal.items[1]
    wanted = conjunction.items[1:] if conjunction.head == "and" else [conjunction]
    if not wanted:
        raise _wrong(goal, "the goal has no facts: give at least one, such as (on a b)")
    return Problem(
        objects=objects,
        init=frozenset(_fact(item, known) for item in sections[":init"].items[1:]),
        goal=frozenset(_fact(item, known) for item in wanted),
    )


def check_name(name: str) -> str | None:
    """Why a word can't be the name of a block; None where it can."""
    if not _NAME.fullmatch(name):
        return "not a name: begin with a letter, and go on with letters, digits, '-' or '_'"
    if name in RESERVED:
        return "a word of the actions: give the block another name"
    return None


@dataclass(slots=True)
class _Node:
    """A word, or the list of what stands between two parentheses (`word` is "(" then), and the line it begins in."""

    line: int
    word: str
    items: list[_Node] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The word that a list begins with; "" where there is none."""
        return self.items[0].word if self.items else ""

    def __str__(self) -> str:
        text = f"({' '.join(map(str, self.items[:8]))})" if self.word == "(" else self.word
        return text if len(text) <= 60 else f"{text[:57]}..."


def _tree(text: str) -> _Node:
    """The one list that a text is."""
    top = _Node(1, "(")
    open_lists = [top]
    for token in _tokens(text):
        if token.word == ")":
            if len(open_lists) == 1:
                raise _wrong(token, "closes nothing: take it away, or add the '(' that it closes")
            open_lists.pop()
            continue
        open_lists[-1].items.append(token)
        if token.word == "(":
            open_lists.append(token)
            if len(open_lists) > _DEPTH:
                raise TaskError(f"line {token.line}: '(': more than {_DEPTH - 1} deep: a problem nests 4 deep at most")
    if len(open_lists) > 1:
        raise TaskError(f"line {open_lists[-1].line}: '({open_lists[-1].head}' is never closed: add a ')'")
    if not top.items or top.items[0].head != "define":
        first = top.items[0] if top.items else top
        raise _wrong(first, "not a problem: begin with (define (problem NAME) ...")
    if len(top.items) > 1:
        raise _wrong(top.items[1], "stands after the end of the problem: take it away")
    return top.items[0]


def _tokens(text: str) -> Iterator[_Node]:
    for number, line in enumerate(text.split("\n"), 1):
        for match in _TOKEN.finditer(line.partition(";")[0]):
            yield _Node(number, match[0].lower())


def _wrong(node: _Node, message: str) -> TaskError:
    return TaskError(f"line {node.line}: '{node}': {message}")


def _sections(tree: _Node) -> dict[str, _Node]:
    """The parts of a problem by name. Raises TaskError for parts that are unknown, given twice or not there."""
    sections: dict[str, _Node] = {}
    for item in tree.items[1:]:
        known = (("problem", ":domain", ":requirements"), (":objects", ":init", ":goal"))
        if not any(item.head in names for names in known):
            raise _wrong(
                item, f"unknown part of a problem: it has {', '.join(f'({name} ...)' for name in sum(known, ()))}"
            )
        if item.head in sections:
            raise _wrong(item, f"a second {item.head}, the first is in line {sections[item.head].line}: join the two")
        sections[item.head] = item
    for name in (":objects", ":init", ":goal"):
        if name not in sections:
            raise TaskError(f"line {tree.line}: '(define': the problem has no {name}: add ({name} ...)")
    return sections


def _objects(section: _Node) -> tuple[str, ...]:
    names: dict[str, int] = {}
    items = iter(section.items[1:])
    for item in items:
        if item.word == "-":  # `a b - block`: the type of all names before it
            kind = next(items, None)
            if kind is None or kind.word not in _TYPES or not names:
                raise _wrong(kind or item, f"not a type: after names and '-' write {' or '.join(_TYPES)}")
            continue
        if why := check_name(item.word):
            raise _wrong(item, why)
        if item.word in names:
            raise _wrong(item, f"declared twice, first in line {names[item.word]}: take one away")
        names[item.word] = item.line
    if not names:
        raise _wrong(section, "there are no blocks: name at least one")
    return tuple(names)


def _fact(item: _Node, objects: frozenset[str]) -> Fact:
    if item.word != "(" or not item.items:
        raise _wrong(item, "not a fact: write one such as (on a b)")
    if item.head in _CONNECTIVES:
        raise _wrong(item, f"'{item.head}' is not taken here: give positive facts only, a goal's in one (and ...)")
    head = item.head.replace("-", "").replace("_", "")
    head = _ALIASES.get(head, head)
    if head not in ARITY:
        raise _wrong(item, f"unknown predicate '{item.items[0]}': use one of {', '.join(ARITY)}")
    arguments = item.items[1:]
    if len(arguments) != ARITY[head]:
        raise _wrong(item, f"'{item.head}' takes {ARITY[head]} blocks, not {len(arguments)}: give as many")
    for argument in arguments:
        if argument.word not in objects:
            raise _wrong(item, f"there is no block '{argument}': add it to :objects, or name one of them")
    return (head, *(argument.word for argument in arguments))
