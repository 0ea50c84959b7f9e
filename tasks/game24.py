"""Game of 24: combine the numbers with + - * / until 24 is left (ToT, section 4.1).

The task validates and computes moves exactly, and never trusts a model about the numbers left.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from pydantic import JsonValue

from tot.decoders.errors import TaskError
from tot.task.task import Task, text_of
from tot.tasks.arithmetic import apply, evaluate, numbers_in, pairings
from tot.tasks.number_answers import last
from tot.tree.thought import State, Thought

TARGET = 24

# Bounded repeats keep the patterns linear. An operand is a whole number, a decimal or a fraction: 4, 1.5, 8/3, -5.
_PLAIN = str.maketrans(
    "×·⋅∗⋆✕✖÷−–[]{}０１２３４５６７８９（）＋－＊／＝",
    "*******/--()()0123456789()+-*/=",
)
_LATEX = re.compile(r"\\(?:left|right|text|mathrm|mathbf|[bB]igg?[lr]?)(?![a-z])|\\[()\[\]!,;]|[$&]")
_BOXED = re.compile(r"\\boxed\s{0,3}\{([^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s{0,3}\{([^{}]*+)\}\s{0,3}\{([^{}]*+)\}")
_MAX_NESTING = 4
"""Maximum nesting depth of LaTeX fractions."""
_SIDE_BY_SIDE = re.compile(r"\)[ \t]{0,3}\(|(?<=[0-9])\((?=[0-9(])")
_TIMES = re.compile(r"\\{1,2}(?:times|cdot|ast)(?![a-z])|(?<=[0-9) ])[xX](?=[0-9( ])")
_BULLET = re.compile(r"^\s{0,9}(?:[-*•]\s|\(?[0-9]{1,3}[.):]\s)")
_OPERAND = r"\(?(-?[0-9]{1,12}(?:\.[0-9]{1,12}|/[0-9]{1,12})?)\)?"
_MOVE = re.compile(
    rf"(?<![0-9.)]){_OPERAND}[ \t]{{0,3}}([-+*/])[ \t]{{0,3}}{_OPERAND}[ \t]{{0,3}}=[ \t]{{0,3}}{_OPERAND}"
    r"(?![0-9(]|[ \t]{0,3}[-+*/=][ \t]{0,3}[0-9(]|\.[0-9])"
)
_ANNOUNCED = re.compile(r"\banswer\b[ \t*_]{0,9}(?:is\b)?[ \t*_:=]{0,9}", re.IGNORECASE)
_EQUATION = re.compile(r"(?:(?<![a-z])[a-z]{1,9}(?=\())?[-+*/().0-9 \t=^²³√]+", re.IGNORECASE)
"""Also matches functions, powers and roots, so that no part of one is read as an expression."""
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Game24(Task):
    """Input: 2 to 6 numbers, "4 9 10 13". Output: an expression that uses each exactly once and equals 24.

    A thought is one move, "13 - 9 = 4", which leaves one number fewer. T = 4, for four numbers; for n numbers, set the
    search depth to n. The world has `left`, the numbers left as exact fractions in text, in ascending order, and
    `terms`, the expression for each. Labels and values are ToT's. Score: 1 if the expression is a solution, else 0.
    """

    name = "game24"
    thought = ("move",)
    depth = 4
    labels: ClassVar[Mapping[str, float]] = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}
    scale = (0.001, 20)
    search = "best-first:rank=prior,batch=4"
    generator = "enumerate"
    evaluator = "classify"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "move": {"max_tokens": 24, "stop": ("\n", " (left")},
        "propose": {"max_tokens": 160, "stop": ("\n\n",)},
        "value": {"max_tokens": 64, "stop": ("\n",)},
        "vote": {"max_tokens": 8, "stop": ("\n",)},
        "chain": {"max_tokens": 160, "stop": ("\n\n",)},
    }

    chat: ClassVar[Mapping[str, Any]] = {"evaluator": "likelihood"}

    def start(self, question: str) -> State:
        """Return the root state, with the numbers in the given order.

        Raises TaskError if the question is not 2 to 6 nonnegative numbers.
        """
        puzzle = super().start(question).question
        tokens = _numbers(puzzle)
        for token in tokens:
            if not _NUMBER.fullmatch(token):
                raise TaskError(
                    f"{token[:40]!r} in the puzzle {puzzle[:80]!r} is not a nonnegative number: "
                    "give whole numbers or decimals, such as '4 9 10 13'"
                )
        if not 2 <= len(tokens) <= 6:
            raise TaskError(f"the puzzle {puzzle[:80]!r} has {len(tokens)} numbers: give 2 to 6, such as '4 9 10 13'")
        # A decimal stays unchanged in its term: as a fraction it would be two numbers.
        return State(question=" ".join(tokens), world=_world([(Fraction(token), token) for token in tokens]))

    def question_of(self, row: Mapping[str, Any]) -> str:
        """Return the numbers: `Puzzles` in ToT's file, otherwise `question`."""
        return text_of(row["Puzzles"] if "Puzzles" in row else row["question"])

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the numbers, which are sufficient to check an answer."""
        return self.question_of(row)

    def variables(self, state: State) -> dict[str, Any]:
        """Template variables, with `steps` (each move and the numbers left), `left` and `expression`.

        `left` has the numbers as text; `expression` is None before the end.
        """
        current, steps = self.start(state.question), []
        for thought in state.thoughts:
            current = self.step(current, thought) or current
            steps.append({"move": thought.parts.get("move", ""), "left": " ".join(_left(current))})
        entries = _entries(state if state.world is not None else current)
        return {
            **super().variables(state),
            "demonstrations": self.prompts.data("demonstrations"),
            "steps": steps,
            "left": " ".join(str(value) for value, _ in entries),
            "expression": _bare(entries[0][1]) if len(entries) == 1 else self._in_chain(state),
        }

    def _in_chain(self, state: State) -> str | None:
        """Return the expression of a chain-of-thought solution, or None."""
        chain = state.thoughts[-1].parts.get("chain") if state.thoughts else None
        return None if chain is None else self.parse_answer(chain)

    def candidate(self, state: State) -> str:
        """Return the moves and the numbers left."""
        return f"{state.text} (left: {' '.join(_left(state))})"

    def parse_thought(self, template: str, text: str) -> str | None:
        """Return the first move in the text as "a op b = c" with exact numbers; None if there is no move."""
        return next(iter(self.parse_proposals(text)), None)

    def parse_proposals(self, text: str) -> list[str]:
        """Return the moves in the text, in order, without duplicates. A sum of three numbers is not a move."""
        moves: dict[str, None] = {}
        for line in map(_plain, text.splitlines()):
            for match in _MOVE.finditer(line):
                a, operator, b, result = match.groups()
                chained = line[max(0, match.start() - 9) : match.start()].rstrip()[-1:] in tuple("+-*/=(")
                if not chained and not any(re.search(r"/0+$", number) for number in (a, b, result)):
                    moves[f"{Fraction(a)} {operator} {Fraction(b)} = {Fraction(result)}"] = None
        return list(moves)

    def parse_value(self, text: str) -> float | None:
        """Return the value of the last label in the text; None if there is no label."""
        words = re.findall(r"[a-z]+", text.lower())
        return next((self.labels[word] for word in reversed(words) if word in self.labels), None)

    def parse_answer(self, text: str) -> str | None:
        """Return the last announced expression ("Answer: (13 - 9) * (10 - 4) = 24"), else the last one in the text.

        For an equation, this is the side with the most numbers. A power or a root is not an expression.
        """
        announced = last(_ANNOUNCED.finditer(text))
        if announced is None:
            lines = text.splitlines()[::-1]
        else:  # the text after it, then the text before it in its line: "6 * 4 = 24 is the answer"
            lines = [*text[announced.end() :].splitlines(), text[: announced.start()].rpartition("\n")[2]]
        for line in lines:
            for equation in _EQUATION.findall(_plain(line)):
                sides = [side.strip(" \t.*") for side in equation.split("=")]
                valid = [side for side in sides if len(numbers_in(side)) > 1 and evaluate(side) is not None]
                if valid:
                    return str(max(valid, key=lambda side: len(numbers_in(side))))
        return None

    def actions(self, state: State) -> list[str]:
        """Return the legal moves, one for each set of numbers that a move can leave; differences may be negative."""
        values = [value for value, _ in _entries(state)]
        moves: dict[tuple[Fraction, ...], str] = {}
        for left, operator, right, result in pairings(values):
            rest = [value for index, value in enumerate(values) if index not in (left, right)]
            moves.setdefault(tuple(sorted([*rest, result])), f"{values[left]} {operator} {values[right]} = {result}")
        return list(moves.values())

    def step(self, state: State, thought: Thought) -> State | None:
        """Return the state after a move; None if its numbers are not both left or its result is wrong."""
        move = self.parse_thought("move", thought.parts.get("move", ""))
        if move is None:
            return None
        a, operator, b, _, result = move.split(" ")
        entries = _entries(state)
        terms = []
        for operand in (Fraction(a), Fraction(b)):
            entry = next((entry for entry in entries if entry[0] == operand), None)
            if entry is None:
                return None
            entries.remove(entry)
            terms.append(entry[1])
        value = apply(operator, Fraction(a), Fraction(b))
        if value is None or value != Fraction(result):
            return None
        return state.then(thought, _world([*entries, (value, f"({terms[0]} {operator} {terms[1]})")]))

    def key(self, state: State) -> Hashable:
        """Return the numbers left, in ascending order: states with the same numbers are equal."""
        return tuple(_left(state))

    def is_terminal(self, state: State) -> bool:
        return len(_left(state)) == 1

    def is_goal(self, state: State) -> bool:
        return _left(state) == [str(TARGET)]

    def heuristic(self, state: State) -> float:
        """Return the remaining moves: 0 at the goal, at least 1 elsewhere. A lower bound on the true cost."""
        return 0.0 if self.is_goal(state) else float(max(1, len(_left(state)) - 1))

    def answer_at(self, state: State) -> str | None:
        """Return the expression at the goal; otherwise None."""
        return _bare(_entries(state)[0][1]) if self.is_goal(state) else None

    def canonical(self, answer: Any) -> str:
        return "".join(str(answer).split())

    def verify(self, question: str, answer: Any) -> bool:
        """Return True if the answer uses each of the question's numbers exactly once and equals 24 exactly."""
        tokens = _numbers(question)
        if not isinstance(answer, str) or not all(map(_NUMBER.fullmatch, tokens)):
            return False
        numbers = sorted(Fraction(token) for token in tokens)
        return sorted(numbers_in(answer)) == numbers and evaluate(answer) == TARGET

    def score(self, answer: Any | None, reference: Any) -> float:
        """Return 1 for a solution, otherwise 0; `reference` is the puzzle's numbers."""
        return float(self.verify(str(reference), answer))


def _numbers(question: str) -> list[str]:
    return [token for token in re.split(r"[\s,;()\[\]{}]+", question) if token]


def _world(entries: Sequence[tuple[Fraction, str]]) -> JsonValue:
    # The sort is stable: equal numbers keep their order.
    ordered = sorted(entries, key=lambda entry: entry[0])
    return {"left": [str(value) for value, _ in ordered], "terms": [term for _, term in ordered]}


def _left(state: State) -> list[str]:
    match state.world:
        case {"left": [*left]}:
            return [str(value) for value in left]
    return [str(value) for value, _ in _entries(state)]


def _entries(state: State) -> list[tuple[Fraction, str]]:
    """Return the numbers left and their terms, in ascending order. Raises TaskError for a state without a world."""
    match state.world:
        case {"left": [*left], "terms": [*terms]}:
            return [(Fraction(str(value)), str(term)) for value, term in zip(left, terms, strict=True)]
    raise TaskError(f"the state of {state.question[:80]!r} has no numbers in its world: create it with start()")


def _bare(term: str) -> str:
    # A combined term has outer parentheses.
    return term.removeprefix("(").removesuffix(")")


def _plain(text: str) -> str:
    """Convert a line of arithmetic for `evaluate`: without bullets and LaTeX, with plain brackets and operators."""
    text = _LATEX.sub("", _BOXED.sub(r"\1", _BULLET.sub("", text)))
    for _ in range(_MAX_NESTING):
        text, count = _LATEX_FRACTION.subn(r"((\1)/(\2))", text)
        if not count:
            break
    text = _TIMES.sub("*", text.translate(_PLAIN)).replace("\\div", "/")
    return _SIDE_BY_SIDE.sub(lambda match: match[0].replace("(", "*("), text)
