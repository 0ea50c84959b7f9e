"""Parse Blocksworld problems in PDDL into objects, facts and a goal.

The parser supports the 4-operator domain: objects (typed or not), positive facts, and a goal that is a fact or a
conjunction. It rejects everything else with line and name; `tot.tasks.blocks.check` rejects impossible problems.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tot.decoders.errors import TaskError
from tot.tasks.blocks import Fact, Problem

ARITY = {"on": 2, "ontable": 1, "clear": 1, "handempty": 0, "holding": 1}
_ALIASES = {
    **dict.fromkeys(("armempty", "emptyhand", "emptyarm", "handfree", "gripperempty"), "handempty"),
    "inhand": "holding",
}
"""Predicate names of other domains, without hyphens."""
_TOKEN = re.compile(r"[()]|[^\s()]++")
_TYPES = ("block", "object")
_CONNECTIVES = ("and", "not", "or", "imply", "forall", "exists", "when", "=")
_REQUIRED = (":objects", ":init", ":goal")
_KNOWN = ("problem", ":domain", ":requirements", *_REQUIRED)
_DEPTH = 32


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

    def wrong(self, message: str) -> TaskError:
        return TaskError(f"line {self.line}: '{self}': {message}")


def read_problem(text: str) -> Problem:
    """Parse a PDDL problem; letter case is ignored, `;` starts a comment.

    Raises TaskError with the line and the invalid text.
    """
    tree = _tree(text)
    sections: dict[str, _Node] = {}
    for item in tree.items[1:]:
        if item.head not in _KNOWN:
            raise item.wrong(f"unknown part of a problem: use {', '.join(f'({name} ...)' for name in _KNOWN)}")
        if item.head in sections:
            raise item.wrong(f"a second {item.head}, the first is in line {sections[item.head].line}: join the two")
        sections[item.head] = item
    for name in _REQUIRED:
        if name not in sections:
            raise TaskError(f"line {tree.line}: '(define': the problem has no {name}: add ({name} ...)")
    goal = sections[":goal"]
    if len(goal.items) != 2:
        raise goal.wrong("the goal is not one fact or one (and ...): give one")
    facts = goal.items[1].items[1:] if goal.items[1].head == "and" else goal.items[1:]
    if not facts:
        raise goal.wrong("the goal has no facts: give at least one, such as (on a b)")
    init = frozenset(map(_fact, sections[":init"].items[1:]))
    return Problem(_objects(sections[":objects"]), init, frozenset(map(_fact, facts)))


def _tree(text: str) -> _Node:
    """Parse a text into its single list."""
    top = _Node(1, "(")
    open_lists = [top]
    for number, line in enumerate(text.split("\n"), 1):
        for match in _TOKEN.finditer(line.partition(";")[0]):
            token = _Node(number, match[0].lower())
            if token.word == ")":
                if len(open_lists) == 1:
                    raise token.wrong("has no matching '(': remove it, or add the '('")
                open_lists.pop()
                continue
            open_lists[-1].items.append(token)
            if token.word == "(":
                open_lists.append(token)
                if len(open_lists) > _DEPTH:
                    raise TaskError(f"line {number}: '(': nested more than {_DEPTH - 1} deep: use at most 4 levels")
    if len(open_lists) > 1:
        raise TaskError(f"line {open_lists[-1].line}: '({open_lists[-1].head}' is not closed: add a ')'")
    if not top.items or top.items[0].head != "define":
        raise (top.items or [top])[0].wrong("not a problem: begin with (define (problem NAME) ...")
    if len(top.items) > 1:
        raise top.items[1].wrong("is after the end of the problem: remove it")
    return top.items[0]


def _objects(section: _Node) -> tuple[str, ...]:
    names: list[str] = []
    items = iter(section.items[1:])
    for item in items:
        if item.word != "-":
            names.append(str(item))
        elif (kind := next(items, item)).word not in _TYPES or not names:  # `a b - block`: the type of names before it
            raise kind.wrong(f"not a type: after names and '-' write {' or '.join(_TYPES)}")
    return tuple(names)


def _fact(item: _Node) -> Fact:
    if not item.items:
        raise item.wrong("not a fact: write one such as (on a b)")
    if item.head in _CONNECTIVES:
        raise item.wrong(f"'{item.head}' is not supported: give positive facts only, in a goal within one (and ...)")
    head = item.head.replace("-", "").replace("_", "")
    head = _ALIASES.get(head, head)
    if head not in ARITY:
        raise item.wrong(f"unknown predicate '{item.items[0]}': use one of {', '.join(ARITY)}")
    arguments = item.items[1:]
    if len(arguments) != ARITY[head]:
        raise item.wrong(f"'{item.head}' takes {ARITY[head]} blocks, not {len(arguments)}: give that number")
    return (head, *map(str, arguments))
