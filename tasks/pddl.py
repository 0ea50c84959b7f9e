"""Parse Blocksworld problems in PDDL into objects, facts and a goal.

The parser supports the 4-operator domain: objects (typed or not), positive facts, and a goal that is a fact or a
conjunction. It rejects everything else with line and name. It does not know actions or check that a state is possible.
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
"""Predicate names of other domains, without hyphens."""
RESERVED = frozenset(
    "the block blocks on onto off top of from table up down and is hand holds empty clear".split()  # noqa: SIM905
)
"""Words in the text of actions and facts, which cannot be names of blocks."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*+")
_TOKEN = re.compile(r"[()]|[^\s()]++")
_TYPES = ("block", "object")
_CONNECTIVES = ("and", "not", "or", "imply", "forall", "exists", "when", "=")
_REQUIRED = (":objects", ":init", ":goal")
_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks, initial facts and goal facts. All other facts are initially false."""

    objects: tuple[str, ...]
    init: frozenset[Fact]
    goal: frozenset[Fact]


def read_problem(text: str) -> Problem:
    """Parse a PDDL problem; letter case is ignored, `;` starts a comment.

    Raises TaskError with the line and the invalid text.
    """
    sections = _sections(_tree(text))
    objects = _objects(sections[":objects"])
    known = frozenset(objects)
    goal = sections[":goal"]
    if len(goal.items) != 2:
        raise _wrong(goal, "the goal is not one fact or one (and ...): give one")
    conjunction = goal.items[1]
    goal_facts = conjunction.items[1:] if conjunction.head == "and" else [conjunction]
    if not goal_facts:
        raise _wrong(goal, "the goal has no facts: give at least one, such as (on a b)")
    return Problem(
        objects=objects,
        init=frozenset(_fact(item, known) for item in sections[":init"].items[1:]),
        goal=frozenset(_fact(item, known) for item in goal_facts),
    )


def check_name(name: str) -> str | None:
    """Return why a word cannot be the name of a block; None if it can."""
    if not _NAME.fullmatch(name):
        return "not a name: start with a letter, followed by letters, digits, '-' or '_'"
    if name in RESERVED:
        return "a reserved word: give the block another name"
    return None


@dataclass(slots=True)
class _Node:
    """A word, or the list of items between parentheses (its `word` is "("), with its first line."""

    line: int
    word: str
    items: list[_Node] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The first word of a list; "" if the list is empty."""
        return self.items[0].word if self.items else ""

    def __str__(self) -> str:
        text = f"({' '.join(map(str, self.items[:8]))})" if self.word == "(" else self.word
        return text if len(text) <= 60 else f"{text[:57]}..."


def _tree(text: str) -> _Node:
    """Parse a text into its single list."""
    top = _Node(1, "(")
    open_lists = [top]
    for token in _tokens(text):
        if token.word == ")":
            if len(open_lists) == 1:
                raise _wrong(token, "has no matching '(': remove it, or add the '('")
            open_lists.pop()
            continue
        open_lists[-1].items.append(token)
        if token.word == "(":
            open_lists.append(token)
            if len(open_lists) > _DEPTH:
                raise TaskError(f"line {token.line}: '(': nested more than {_DEPTH - 1} deep: use at most 4 levels")
    if len(open_lists) > 1:
        raise TaskError(f"line {open_lists[-1].line}: '({open_lists[-1].head}' is not closed: add a ')'")
    if not top.items or top.items[0].head != "define":
        first = top.items[0] if top.items else top
        raise _wrong(first, "not a problem: begin with (define (problem NAME) ...")
    if len(top.items) > 1:
        raise _wrong(top.items[1], "is after the end of the problem: remove it")
    return top.items[0]


def _tokens(text: str) -> Iterator[_Node]:
    for number, line in enumerate(text.split("\n"), 1):
        for match in _TOKEN.finditer(line.partition(";")[0]):
            yield _Node(number, match[0].lower())


def _wrong(node: _Node, message: str) -> TaskError:
    return TaskError(f"line {node.line}: '{node}': {message}")


def _sections(tree: _Node) -> dict[str, _Node]:
    """Return the parts of a problem by name. Raises TaskError for unknown, repeated or missing parts."""
    sections: dict[str, _Node] = {}
    for item in tree.items[1:]:
        known = ("problem", ":domain", ":requirements", *_REQUIRED)
        if item.head not in known:
            raise _wrong(item, f"unknown part of a problem: use {', '.join(f'({name} ...)' for name in known)}")
        if item.head in sections:
            raise _wrong(item, f"a second {item.head}, the first is in line {sections[item.head].line}: join the two")
        sections[item.head] = item
    for name in _REQUIRED:
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
            raise _wrong(item, f"declared twice, first in line {names[item.word]}: remove one")
        names[item.word] = item.line
    if not names:
        raise _wrong(section, "there are no blocks: name at least one")
    return tuple(names)


def _fact(item: _Node, objects: frozenset[str]) -> Fact:
    if item.word != "(" or not item.items:
        raise _wrong(item, "not a fact: write one such as (on a b)")
    if item.head in _CONNECTIVES:
        raise _wrong(item, f"'{item.head}' is not supported: give positive facts only, in a goal within one (and ...)")
    head = item.head.replace("-", "").replace("_", "")
    head = _ALIASES.get(head, head)
    if head not in ARITY:
        raise _wrong(item, f"unknown predicate '{item.items[0]}': use one of {', '.join(ARITY)}")
    arguments = item.items[1:]
    if len(arguments) != ARITY[head]:
        raise _wrong(item, f"'{item.head}' takes {ARITY[head]} blocks, not {len(arguments)}: give that number")
    for argument in arguments:
        if argument.word not in objects:
            raise _wrong(item, f"there is no block '{argument}': add it to :objects, or use one of the objects")
    return (head, *(argument.word for argument in arguments))
