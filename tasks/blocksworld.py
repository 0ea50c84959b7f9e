"""Blocksworld: plans that turn some piles of blocks into others (SEED, Appendix D; RAP, section 4.1).

`State.world` has the true facts, so illegal actions are rejected and the goal is detected. A question is PDDL, or three
lines as `render` writes them. No prompt or method reveals the length of a plan to a search.
"""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import JsonValue

from tot.decoders.errors import TaskError
from tot.task.task import Task, text_of
from tot.tasks.blocks import (
    Action,
    Fact,
    Facts,
    Problem,
    apply,
    check,
    legal_actions,
    parse_action,
    read_fact,
    sentence,
    short,
    solves,
)
from tot.tasks.blocks_planner import estimate, generate, plain_plan, shortest_plan
from tot.tasks.pddl import read_problem
from tot.tree.thought import State, Thought

_LINE = re.compile(r"[^\S\n]*+(blocks|start|goal)[^\S\n]*+:([^\n]*+)", re.IGNORECASE)
_NUMBERED = re.compile(
    r"\A(?:\[[ x]\]\s)?(?:action|step)?\s*+[\[(]?\d{0,3}+[\])]?\s*+(?:[.:)]|[-–—](?=\s))?\s*+", re.IGNORECASE
)
_ORDER = re.compile(
    r"\A(?:(?:first|second|third|fourth|fifth|next|then|now|after\s(?:that|this)|afterwards|final|last)(?:ly)?|and|so|i|we"
    r"|you|will|must|should|(?:need|have)\sto|let['’]?s|let\sus|(?:to\s)?(?:begin|start)(?:\s(?:by|with))?"
    r"|(?:[a-z]++\s){0,3}plan(?:\s[a-z]++){0,2}:)[,:]?\s++",
    re.IGNORECASE,
)
"""Words before an action; several may occur in sequence."""
_JOINT = re.compile(r"\b(?:and(?:\s{1,3}then)?|then)\s{1,3}(?=(?:(?:un)?stack|pick|put)\b)", re.IGNORECASE)
"""The conjunction between two actions in one line."""
_MARK = re.compile(
    r"</?\w{1,20}>|(?<![-=])[-=]++>|[→⇒|&>①-⑳]|:\s?\[|\s\d{1,2}\)\s(?=(?:un)?stack|pick|put)", re.IGNORECASE
)
"""Arrows, columns of a table, tags and numbers between actions."""
_VERB = r"(?:(?:un)?stack|pick[-_]?up|put[-_]?down)"
_JSON = re.compile(rf"[\"']({_VERB})[\"']\s*,(?:\s*[\"']\w{{1,20}}[\"']\s*:)?\s*\[?([^\[\]{{}}]*)", re.IGNORECASE)
_PIECE = re.compile(rf"[^\S\n]*+(?i:{_VERB})\([^()\n]*+\)|\([^()\n]*+\)|[^();,.\n]++")


class Blocksworld(Task):
    """Input: a problem, as PDDL or in words. Output: a plan, a list of PDDL actions such as "(unstack b c)".

    A thought is one action; its value is 1 for good and 0 for bad. T = 7: six actions, then the answer. Score: 1 for
    a legal plan of any length that reaches the goal, else 0. The reward for MCTS is RAP's: 100 at the goal, else the
    fraction of the goal's facts that are true.
    """

    name = "blocksworld"
    thought = ("action",)
    depth = 7
    labels: ClassVar[Mapping[str, float]] = {"good": 1.0, "bad": 0.0}
    scale = (0, 1)
    search = "best-first:rank=cost"  # A*, which needs no model: see docs/benchmarks/worlds.md
    generator = "enumerate:temperature=3"
    evaluator = "likelihood"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "action": {"max_tokens": 16, "stop": ("\n",)},
        "value": {"max_tokens": 8},
        "propose": {"max_tokens": 96, "stop": ("\n\n",)},
        "chain": {"max_tokens": 192, "stop": ("\n\n", "The goal is")},
    }
    chat: ClassVar[Mapping[str, Any]] = {"generator": "enumerate"}

    def start(self, question: str) -> State:
        """Return the root state. Raises TaskError with the reason for a malformed or impossible problem."""
        state = super().start(question)
        return state.model_copy(update={"world": _world(_problem(state.question).init)})

    def question_of(self, row: Mapping[str, Any]) -> str:
        """Return a row's PDDL, from `pddl` or `question`."""
        return text_of(row["pddl"], "pddl") if "pddl" in row else super().question_of(row)

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the question: many plans can be correct, so `score` executes the plan."""
        return self.question_of(row)

    def instance(self, seed: int) -> dict[str, Any]:
        """Generate a problem of 3 to 5 blocks with a shortest plan of 2 to 12 steps; mostly 4 blocks, 6 to 10 steps.

        Its solution continues the prompt of `chain` and puts all blocks down before it builds the goal: small models
        learn it faster than a shortest plan.
        """
        rng = random.Random(seed)
        blocks = rng.choices((3, 4, 5), (2, 8, 1))[0]
        steps = min(2 * rng.choices(range(1, 7), (1, 2, 4, 4, 3, 2))[0], 4 * (blocks - 1))
        problem = generate(seed, blocks, steps)
        actions = [action.text for action in map(parse_action, plain_plan(problem)) if action]
        solution = numbered(actions).removeprefix("Action 1:") + "\nThe goal is reached."
        return {"question": render(problem), "steps": steps, "plan": shortest_plan(problem), "solution": solution}

    def variables(self, state: State) -> dict[str, Any]:
        """Template variables: `question` in words, `state_text` the actions so far, and `now` the current facts."""
        return {
            **super().variables(state),
            "question": render(_problem(state.question)),
            "demonstrations": self.prompts.data("demonstrations"),
            "state_text": numbered([thought.text for thought in state.thoughts]),
            "now": sentence(_facts(state)),
        }

    def candidate(self, state: State) -> str:
        """Return the whole plan: votes compare plans, not last actions."""
        return state.text

    def parse_thought(self, template: str, text: str) -> str | None:
        """Return an action in its canonical form, "unstack b from c"; None if the text is not one action."""
        action = parse_action(_unnumbered(text))
        return action.text if action else None

    def parse_proposals(self, text: str) -> list[str]:
        """Return the lines that are actions, without duplicates."""
        actions = (self.parse_thought("action", line) for line in text.splitlines())
        return list(dict.fromkeys(action for action in actions if action))

    def parse_value(self, text: str) -> float | None:
        """Return the value of the first "good" or "bad"; None if there is neither."""
        match = re.search(rf"\b(?:{'|'.join(self.labels)})\b", text.lower())
        return self.labels[match[0]] if match else None

    def parse_answer(self, text: str) -> list[str] | None:
        """Return the actions in a text, as PDDL: in brackets, in words, in JSON or in a table.

        Actions are separated by line ends, punctuation, arrows or "and". "It" is the block of the action before. Other
        text is ignored. None if there are no actions.
        """
        text = _JSON.sub(lambda match: f"({match[1]} {re.sub('[^a-z0-9_-]+', ' ', match[2].lower())})", text)
        plan: list[Action] = []
        for piece in _PIECE.findall(_JOINT.sub("\n", _MARK.sub("\n", text))):
            if action := parse_action(_unnumbered(piece)):
                if plan and action.blocks[0] == "it":
                    action = Action(action.name, (plan[-1].blocks[0], *action.blocks[1:]))
                plan.append(action)
        return [action.pddl for action in plan] or None

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
        """A lower bound on the remaining steps, so A* finds a shortest plan."""
        return float(estimate(_facts(state), _problem(state.question).goal))

    def reward(self, state: State) -> float:
        """100 at the goal, else the fraction of the goal's facts that are true, below 1 (RAP, section 4.1)."""
        goal = _problem(state.question).goal
        return 100.0 if self.is_terminal(state) else len(goal & _facts(state)) / len(goal)

    def answer_at(self, state: State) -> list[str] | None:
        """Return the plan so far if it reaches the goal, [] if the start is the goal; otherwise None."""
        return _pddl([thought.text for thought in state.thoughts]) if self.is_terminal(state) else None

    def canonical(self, answer: Any) -> Hashable:
        """Return a plan's actions as a tuple of PDDL."""
        return tuple(_pddl(_steps(self, answer)))

    def verify(self, question: str, answer: Any) -> bool:
        """Return True if the answer, a list of actions or a text that contains actions, solves the question."""
        return solves(_problem(question.strip()), _steps(self, answer))

    def score(self, answer: Any | None, reference: str) -> float:
        """Return 1.0 if the answer is a correct plan for `reference`, which is the question (see `reference_of`)."""
        return float(answer is not None and self.verify(reference, answer))


class DirectBlocksworld(Blocksworld):
    """Blocksworld for models fine-tuned on it: the prompt is only the problem, and the reply only the plan."""

    name = "blocksworld_direct"
    search = "cot"


def render(problem: Problem) -> str:
    """Return a problem in three lines, Blocks, Start and Goal, which is a valid question."""
    return f"Blocks: {', '.join(problem.objects)}.\nStart: {sentence(problem.init)}.\nGoal: {sentence(problem.goal)}."


def read_text(text: str) -> Problem:
    """Parse the three lines that `render` writes. Raises TaskError with the invalid line and piece."""
    lines: dict[str, str] = {}
    for line in filter(str.strip, text.split("\n")):
        match = _LINE.match(line)
        if not match or match[1].lower() in lines:
            raise TaskError(
                f"{short(line)!r}: the question is neither PDDL nor three lines, Blocks, Start and Goal: begin with "
                "(define (problem ... or write 'Blocks: a, b.', 'Start: a is on b, ...' and 'Goal: b is on a.'"
            )
        lines[match[1].lower()] = match[2].strip().removesuffix(".").lower()
    for name in ("blocks", "start", "goal"):
        if not lines.get(name):
            raise TaskError(f"the question has no {name.title()}: add a line {name.title() + ': ...'!r}")
    objects = tuple(block.strip() for block in lines["blocks"].split(","))
    return Problem(objects, *(_read_facts(name, lines[name]) for name in ("start", "goal")))


def numbered(actions: Sequence[str]) -> str:
    """Return a plan as in prompts: `Action 1: ...`, one per line; "" for an empty plan."""
    return "\n".join(f"Action {number}: {action}" for number, action in enumerate(actions, 1))


def _read_facts(name: str, text: str) -> Facts:
    facts: set[Fact] = set()
    for piece in text.split(","):
        words = " ".join(piece.split())
        if (fact := read_fact(words)) is None:
            raise TaskError(
                f"{name.title()}: {short(words)!r} is not a fact: write 'a is on b', 'a is on the table', "
                "'a is clear', 'the hand holds a' or 'the hand is empty'"
            )
        facts.add(fact)
    return frozenset(facts)


@lru_cache(maxsize=1024)
def _problem(question: str) -> Problem:
    """Parse and check the problem of a question. Cached."""
    problem = read_problem(question) if question.startswith(("(", ";")) else read_text(question)
    check(problem)
    return problem


def _world(facts: Facts) -> list[JsonValue]:
    return [*sorted(map(" ".join, facts))]


def _facts(state: State) -> Facts:
    if not isinstance(state.world, list):
        raise TaskError("the state has no world: create it with `start` or `step`")
    return frozenset(tuple(str(fact).split()) for fact in state.world)


def _unnumbered(text: str) -> str:
    """Remove a prefix such as `2.`, `Action 2:`, `- ` or `then`."""
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
