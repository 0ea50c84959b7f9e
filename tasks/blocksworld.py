"""Blocksworld: plans that turn some piles of blocks into others (SEED, appendix C; RAP, section 4.1).

The task keeps the true world in `State.world`, so illegal actions are refused and a reached goal is seen. A question
is PDDL, or the three lines that `render` writes. No prompt or method tells a search how long a plan has to be.
"""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import JsonValue

from tot.decoders.errors import TaskError
from tot.task.dataset import text_of
from tot.task.task import Task
from tot.tasks.blocks import Facts, apply, check, legal_actions, parse_action, say, solves, unreachable
from tot.tasks.blocks_planner import estimate, generate, plain_plan, shortest_plan
from tot.tasks.pddl import Fact, Problem, check_name, read_problem
from tot.tree.thought import State, Thought

_LINE = re.compile(r"[^\S\n]*+(blocks|start|goal)[^\S\n]*+:([^\n]*+)", re.IGNORECASE)
_FACTS = {
    "on": re.compile(r"(\S++) is on (\S++)"),
    "ontable": re.compile(r"(\S++) is on the table"),
    "clear": re.compile(r"(\S++) is clear"),
    "holding": re.compile(r"the hand holds (\S++)"),
    "handempty": re.compile(r"the hand is empty"),
}
_NUMBERED = re.compile(r"\A(?:action|step)?\s*+[\[(]?\d{0,3}+[\])]?\s*+(?:[.:)]|[-–—](?=\s))?\s*+", re.IGNORECASE)
_ORDER = re.compile(
    r"\A(?:(?:first|second|third|fourth|fifth|next|then|now|after\s(?:that|this)|afterwards|final|last)(?:ly)?|and|so|i|we"
    r"|you|will|must|should|(?:need|have)\sto|let['’]?s|let\sus|(?:to\s)?(?:begin|start)(?:\s(?:by|with))?)[,:]?\s++",
    re.IGNORECASE,
)
"""Words before an action, several of which may follow one another."""
_JOINT = re.compile(r"\b(?:and(?:\s{1,3}then)?|then)\s{1,3}(?=(?:(?:un)?stack|pick|put)\b)", re.IGNORECASE)
"""What joins two actions in one line."""


class Blocksworld(Task):
    """Input: a problem, as PDDL or in words. Output: a plan, a list of PDDL actions such as "(unstack b c)".

    A thought is one action; its value is 1 for good and 0 for bad. T = 7: six actions, then the answer. Score: 1 for
    a plan that is legal and ends with the goal reached, however long, else 0. The reward for MCTS is RAP's: 100 at the
    goal, else the share of the goal's facts that hold.
    """

    name = "blocksworld"
    thought = ("action",)
    depth = 7
    labels: ClassVar[Mapping[str, float]] = {"good": 1.0, "bad": 0.0}
    default_value = 0.0
    search = "best-first:rank=cost"  # A*, which asks no model: measured, docs/benchmarks/worlds.md
    generator = "enumerate:temperature=3"
    evaluator = "likelihood"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "action": {"max_tokens": 16, "stop": ("\n",)},
        "value": {"max_tokens": 8},
        "propose": {"max_tokens": 96, "stop": ("\n\n",)},
        "chain": {"max_tokens": 192, "stop": ("\n\n", "The goal is")},
        "answer": {"max_tokens": 192, "stop": ("\n\n", "The goal is")},
    }

    def start(self, question: str) -> State:
        """The root state. Raises TaskError for a malformed problem, an impossible start or goal, naming why."""
        state = super().start(question)
        return state.model_copy(update={"world": _world(_problem(state.question).init)})

    def question_of(self, row: Mapping[str, Any]) -> str:
        """A row's PDDL, in `pddl` or `question`."""
        return text_of(row["pddl"], "pddl") if "pddl" in row else super().question_of(row)

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """The question itself: `score` does the plan in it, since many plans are right."""
        return self.question_of(row)

    def solution_of(self, row: Mapping[str, Any]) -> str:
        """A plain plan in words, from after "Action 1:" on: all blocks down, then up again as the goal says. A small
        model learns it sooner than a shortest one."""
        actions = map(parse_action, plain_plan(_problem(self.question_of(row).strip())))
        written = numbered([action.text for action in actions if action])
        return written.removeprefix("Action 1:") + "\nThe goal is reached."

    def instance(self, seed: int) -> dict[str, Any]:
        """A problem of 3 to 5 blocks with a shortest plan of 2 to 12 steps, mostly 4 blocks and 6 to 10 steps."""
        chance = random.Random(seed)
        blocks = chance.choices((3, 4, 5), (2, 8, 1))[0]
        steps = min(2 * chance.choices(range(1, 7), (1, 2, 4, 4, 3, 2))[0], 4 * (blocks - 1))
        problem = generate(seed, blocks, steps)
        return {"question": render(problem), "steps": steps, "plan": shortest_plan(problem)}

    def variables(self, state: State) -> dict[str, Any]:
        """`question` in words, `state_text` the actions so far, and `now` the facts after them."""
        return {
            **super().variables(state),
            "question": render(_problem(state.question)),
            "demonstrations": self.data("demonstrations"),
            "state_text": numbered([thought.text for thought in state.thoughts]),
            "now": _sentence(_facts(state)),
        }

    def candidate(self, state: State) -> str:
        """The whole plan: voters compare plans, not last actions."""
        return state.text

    def parse_thought(self, template: str, text: str) -> str | None:
        """An action in its one way of writing, "unstack b from c"; None where the text is not one action."""
        action = parse_action(_unnumbered(text))
        return action.text if action else None

    def parse_proposals(self, text: str) -> list[str]:
        """The lines that are actions, each once."""
        read = (self.parse_thought("action", line) for line in text.splitlines())
        return list(dict.fromkeys(line for line in read if line))

    def parse_value(self, text: str) -> float | None:
        """What the first "good" or "bad" is worth; None where there is neither."""
        found = re.search(rf"\b(?:{'|'.join(self.labels)})\b", text.lower())
        return self.labels[found[0]] if found else None

    def parse_answer(self, text: str) -> list[str] | None:
        """The actions in a text, as PDDL: in brackets, or in words between ends of lines, `,`, `;` and `.`.

        What is no action is passed over. None where there is none.
        """
        lines = _JOINT.sub("\n", text)
        pieces = re.findall(r"(?i:(?:un)?stack|pick-?up|put-?down)\([^()\n]*+\)|\([^()\n]*+\)|[^();,.\n]++", lines)
        actions = (parse_action(_unnumbered(piece)) for piece in pieces)
        return [action.pddl for action in actions if action] or None

    def actions(self, state: State) -> Sequence[str]:
        return [action.text for action in legal_actions(_facts(state))]

    def step(self, state: State, thought: Thought) -> State | None:
        action = parse_action(_unnumbered(thought.text))
        after = apply(_facts(state), action) if action else None
        if action is None or after is None:
            return None
        return state.then(Thought(parts={"action": action.text}), _world(after))

    def is_terminal(self, state: State) -> bool:
        return _problem(state.question).goal <= _facts(state)

    def is_goal(self, state: State) -> bool:
        return self.is_terminal(state)

    def heuristic(self, state: State) -> float:
        """Never more than the steps still to come, so A* finds a shortest plan."""
        return float(estimate(_facts(state), _problem(state.question).goal))

    def reward(self, state: State) -> float:
        """100 at the goal, else the share of its facts that hold, below 1 (RAP, section 4.1)."""
        goal = _problem(state.question).goal
        return 100.0 if self.is_terminal(state) else len(goal & _facts(state)) / len(goal)

    def answer_at(self, state: State) -> list[str] | None:
        """The plan so far where it reaches the goal: [] where nothing was to do. None elsewhere."""
        return _pddl([thought.text for thought in state.thoughts]) if self.is_terminal(state) else None

    def canonical(self, answer: Any) -> Hashable:
        """A plan's actions as a tuple of PDDL."""
        return tuple(_pddl(_steps(self, answer)))

    def verify(self, question: str, answer: Any) -> bool:
        """Whether the answer, a list of actions or text with some in it, is a plan that solves the question."""
        return solves(_problem(question.strip()), _steps(self, answer))

    def score(self, answer: Any | None, reference: str) -> float:
        """1.0 where the answer is a right plan for `reference`, which is the question (see `reference_of`)."""
        return float(answer is not None and self.verify(reference, answer))

    chat: ClassVar[Mapping[str, Any]] = {"generator": "enumerate"}


class DirectBlocksworld(Blocksworld):
    """Blocksworld for models that were tuned on it: the problem alone is asked, and the plan comes at once."""

    name = "blocksworld"
    chain = "direct"
    search = "cot"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **Blocksworld.sampling,
        "direct": Blocksworld.sampling["chain"],
    }


def render(problem: Problem) -> str:
    """A problem in three lines, Blocks, Start and Goal, which can be a question too."""
    return f"Blocks: {', '.join(problem.objects)}.\nStart: {_sentence(problem.init)}.\nGoal: {_sentence(problem.goal)}."


def read_text(text: str) -> Problem:
    """The problem that `render` wrote. Raises TaskError naming the line and the piece that can't be read."""
    lines: dict[str, str] = {}
    for line in filter(str.strip, text.split("\n")):
        found = _LINE.match(line)
        if not found or found[1].lower() in lines:
            raise TaskError(
                f"{_short(line)!r}: the question is neither PDDL nor three lines, Blocks, Start and Goal: begin with "
                "(define (problem ... or write 'Blocks: a, b.', 'Start: a is on b, ...' and 'Goal: b is on a.'"
            )
        lines[found[1].lower()] = found[2].strip().removesuffix(".").lower()
    for name in ("blocks", "start", "goal"):
        if not lines.get(name):
            raise TaskError(f"the question has no {name.title()}: add a line {name.title() + ': ...'!r}")
    objects = tuple(block.strip() for block in lines["blocks"].split(","))
    for place, block in enumerate(objects):
        why = "named twice: take one away" if block in objects[:place] else check_name(block)
        if why:
            raise TaskError(f"Blocks: {_short(block)!r}: {why}")
    init, goal = (_read_facts(name, lines[name], frozenset(objects)) for name in ("start", "goal"))
    return Problem(objects, init, goal)


def numbered(actions: Sequence[str]) -> str:
    """A plan as prompts show it: `Action 1: ...`, one a line; "" for an empty one."""
    return "\n".join(f"Action {number}: {action}" for number, action in enumerate(actions, 1))


def _read_facts(name: str, text: str, objects: frozenset[str]) -> Facts:
    facts: set[Fact] = set()
    for piece in text.split(","):
        words = " ".join(piece.split())
        found = ((kind, pattern.fullmatch(words)) for kind, pattern in _FACTS.items())
        fact = next(((kind, *match.groups()) for kind, match in found if match), None)
        if fact is None:
            raise TaskError(
                f"{name.title()}: {_short(words)!r} is not a fact: write 'a is on b', 'a is on the table', "
                "'a is clear', 'the hand holds a' or 'the hand is empty'"
            )
        if unknown := [block for block in fact[1:] if block not in objects]:
            raise TaskError(
                f"{name.title()}: {_short(words)!r}: there is no block {_short(unknown[0])!r}: name it in Blocks"
            )
        facts.add(fact)
    return frozenset(facts)


def _sentence(facts: Facts) -> str:
    """Facts in words: where blocks are, then the hand, then which are clear."""
    order = ("on", "ontable", "holding", "handempty", "clear")
    return ", ".join(say(fact) for fact in sorted(facts, key=lambda fact: (order.index(fact[0]), fact)))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


@lru_cache(maxsize=1024)
def _problem(question: str) -> Problem:
    """The checked problem that a question states, read once."""
    problem = read_problem(question) if question.startswith(("(", ";")) else read_text(question)
    check(problem)
    if why := unreachable(problem):
        raise TaskError(f"this instance can't be solved: {why}: correct the goal")
    return problem


def _world(facts: Facts) -> list[JsonValue]:
    return [*sorted(map(" ".join, facts))]


def _facts(state: State) -> Facts:
    if not isinstance(state.world, list):
        raise TaskError("the state has no world: take it from `start` or `step`")
    return frozenset(tuple(str(fact).split()) for fact in state.world)


def _unnumbered(text: str) -> str:
    """Text without `2.`, `Action 2:`, `- ` or `then` before it."""
    bare = _NUMBERED.sub("", text.strip().lstrip("-*• "), count=1).lstrip("* ")
    for _ in range(4):
        bare = _ORDER.sub("", bare, count=1)
    return bare


def _steps(task: Task, answer: Any) -> list[str]:
    if isinstance(answer, str):
        return task.parse_answer(answer) or [answer]
    return [str(step) for step in answer] if isinstance(answer, (list, tuple)) else ["no plan"]


def _pddl(steps: Sequence[str]) -> list[str]:
    actions = ((step, parse_action(step)) for step in steps)
    return [action.pddl if action else step.strip() for step, action in actions]
