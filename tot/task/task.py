"""Task: what a user subclasses. Templates to ask with, and a few methods that read what comes back.

A task knows nothing of models, decoders or searches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal, Self

from tot.decoders.errors import OptionError, TaskError
from tot.decoders.request import Message, in_unicode
from tot.task import parsing
from tot.task.dataset import Dataset
from tot.task.templates import Templates
from tot.task.world import World
from tot.tree.thought import State


class Task(World, Dataset):
    """A kind of problem.

    Input: a question (text). Output: an answer, found by growing thoughts, judging states, and asking for the answer at
    the best one. The least a task needs is three templates, inline or as files:

        class Riddle(Task):
            templates = {
                "thought": "Riddle: {{ question }}\\nGive one more idea.",
                "value": "Riddle: {{ question }}\\nIdea: {{ thoughts[-1].thought }}\\nHow good is it, from 1 to 10?",
                "answer": "Riddle: {{ question }}\\nBest idea: {{ thoughts[-1].thought }}\\nAnswer in one word.",
            }

    A template sees `question`, `thoughts` (a mapping from template name to text for each thought so far),
    `observations` (what came of each, where the task acts on thoughts) and whatever `variables` adds. Without blocks it
    is one user message; the blocks `system`, `user` and `assistant` make messages of their own, the last being a prefix
    that the model goes on writing.

    `World` says how a task whose thoughts are actions is written (Blocksworld), `Dataset` where questions come from.
    Each method has the default described in its docstring.
    """

    name: ClassVar[str] = "task"
    """Where the templates are looked up: a folder beside the task's file, then in the package; by default the class's
    name in snake_case. What isn't there is looked for where the classes that it inherits from have theirs."""
    templates: ClassVar[Mapping[str, str]] = {}
    """Inline templates by name; they go before files. Those that a subclass doesn't name are its parent's."""
    thought: ClassVar[tuple[str, ...]] = ("thought",)
    """Templates of one thought, asked in this order: each sees the outputs of those before it as variables."""
    propose: ClassVar[str] = "propose"
    """Template that asks for several next thoughts in one reply; it sees `count`. `Propose` asks it in place of the
    first template of `thought`. By default that template's prompt, with the wish for so many."""
    value: ClassVar[str] = "value"
    """Template that state evaluators ask; it sees the parts of the last thought as variables of their own."""
    values: ClassVar[str] = "values"
    """Template that asks for the value of several states at once, of which it sees `candidates` as `vote` does: each
    under the title "Candidate 1", "Candidate 2", and in the end all numbers. Only `pdos` is asked it."""
    vote: ClassVar[str] = "vote"
    """Template that compares states: it sees `candidates`, a list of texts to be numbered from 1. By default the
    question, the candidates, and which one is best."""
    chain: ClassVar[str] = "chain"
    """Template that asks for a whole solution at once, which the baselines use. Where there is none, and no world, a
    solution is a thought, and then the answer."""
    answer: ClassVar[str] = "answer"
    triggers: ClassVar[Mapping[str, str]] = {}
    """By template: text after which the answer follows, such as {"chain": "\\nThe answer is"}. What the template asks
    for is then a rationale, which a decoder such as `fastcot` may cut."""
    depth: ClassVar[int] = 4
    """T: T - 1 levels of thoughts, then the answer."""
    scale: ClassVar[tuple[int, int]] = (1, 10)
    """The whole numbers that a value may be."""
    labels: ClassVar[Mapping[str, float]] = {}
    """Words an evaluation may be instead of a number, and what each is worth: {"good": 1, "bad": 0}."""
    default_value: ClassVar[float] = 1.0
    """The value of a state whose evaluation can't be read."""
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sampling options by template name, such as {"thought": {"max_tokens": 64, "stop": ("\\n",)}}."""
    filters: ClassVar[Mapping[str, float]] = {}
    """Which tokens are drawn from, where neither the run nor the model says: {"top_p": 0.8, "top_k": 20}."""
    chat: ClassVar[Mapping[str, Any]] = {}
    """What is different of the attributes here where a model with a chat template is asked in its own format, and
    answers in its own way; the templates for that lie in a folder `chat` beside the others. Nothing: no such suite."""
    prompts: ClassVar[Literal["papers", "chat"]] = "papers"
    """Which prompts are asked with."""
    verdict: ClassVar[str] = "verified"
    """What an answer is called that `verify` takes."""
    search: ClassVar[str] = "bfs"
    """The search, thought generator and state evaluator that `solve` takes where it is given none, by name, with
    options after a colon: "mcts:iterations=20,exploration=2"."""
    generator: ClassVar[str] = "sample"
    evaluator: ClassVar[str] = "likelihood"

    def __init_subclass__(cls) -> None:
        if "chat" not in cls.__dict__ and {"templates", "thought"} & cls.__dict__.keys():
            cls.chat = {}  # the parent's prompts would hide its own
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self) -> None:
        self._templates = Templates(type(self), self.templates)
        self._papers: Self | None = None

    def in_chat(self) -> Self:
        """The same task with its prompts for chat models. Raises OptionError where it has none."""
        if not self.chat:
            raise OptionError(f"task {type(self).__name__} has no prompts for chat models: leave prompts='chat' out")
        if self.prompts == "chat":
            return self
        other = copy(self)
        vars(other).update(self.chat, prompts="chat")
        other._templates = Templates(type(other), other.templates, "chat")
        other._papers = self
        return other

    def in_papers(self) -> Self:
        """The same task with the papers' prompts."""
        return self._papers or self

    def start(self, question: str) -> State:
        """The root state. Raises TaskError for a question that can't be one."""
        question = question.strip().removeprefix("\ufeff")
        if not question.strip():
            raise TaskError("the question is empty: give some text")
        if any("\udc80" <= character <= "\udcff" for character in question):  # bytes that Python could not decode
            raise TaskError("the question is not Unicode text: give it in UTF-8")
        return State(question=in_unicode(question.strip()))

    def variables(self, state: State) -> dict[str, Any]:
        """What templates see of a state."""
        seen = [None if thought.observation is None else thought.observation.text for thought in state.thoughts]
        parts = [thought.parts for thought in state.thoughts]
        return {"question": state.question, "thoughts": parts, "observations": seen}

    def prompt(self, template: str, state: State, /, **extra: Any) -> tuple[Message, ...]:
        """The messages of one call about `state`. Raises TaskError where `extra` would hide one of its variables."""
        variables = self.variables(state)
        if hidden := sorted(variables.keys() & extra.keys()):
            raise TaskError(
                f"task {type(self).__name__} has a thought template named {hidden[0]!r}, which would hide "
                "the variable of that name: rename it"
            )
        # What the templates in prompts/task, which any task has, are about.
        about: dict[str, Any] = {"thought_template": next(iter(self.thought), "thought"), "value_template": self.value}
        about["labels"] = list(self.labels) or ["Yes", "No"]
        return self._templates.render(template, **{**about, **variables, **extra})

    def has_template(self, template: str) -> bool:
        return template in self._templates

    def has_default(self, template: str) -> bool:
        """Return whether a template is the default of all tasks (`prompts/task`)."""
        return self._templates.is_default(template)

    def require(self, *templates: str) -> None:
        """Raise TaskError for the first of `templates` that is missing."""
        for template in templates:
            self._templates.require(template)

    def steps(self, template: str, state: State) -> Sequence[str]:
        """Titles of the parts that a template's text consists of, where they don't need each other: `pdos` writes them
        side by side, other decoders as they come. By default none."""
        return ()

    def data(self, name: str) -> Any:
        """The JSON file `name` that lies with the task's templates. Raises TaskError if there is none."""
        return self._templates.data(name)

    def parse_thought(self, template: str, text: str) -> str | None:
        """What is kept of a thought template's output; None rejects the thought."""
        return text.strip() or None

    def parse_proposals(self, text: str) -> list[str]:
        """The thoughts that one reply lists: by default its list items, or its lines."""
        return parsing.parse_proposals(text)

    def parse_value(self, text: str) -> float | None:
        """The value in an evaluator's reply: by default the number on the scale; None if there is none."""
        return parsing.parse_value(text, *self.scale)

    def candidate(self, state: State) -> str:
        """How a state is shown to voters: by default its last thought."""
        return state.thoughts[-1].text

    def parse_vote(self, text: str, candidates: int) -> int | None:
        """The number of the candidate that a reply is for, from 1 to `candidates`; None if there is none."""
        return parsing.parse_vote(text, candidates)

    def is_answered(self, message: str) -> bool:
        """True where a message that a model is writing holds its answer, and nothing more is needed of it."""
        return False

    def parse_answer(self, text: str) -> Any | None:
        """The answer in a text; None if there is none."""
        return text.strip() or None

    def parse_truncated(self, text: str) -> Any | None:
        """The answer in a text that the token limit ended: by default as `parse_answer` reads it.

        A task whose `parse_answer` guesses, such as by the last number, should only read an announced answer here.
        """
        return self.parse_answer(text)

    def choices(self, state: State) -> Sequence[str]:
        """The answers to choose from: where there are some, the likeliest after the answer template is taken."""
        return ()

    def canonical(self, answer: Any) -> Hashable:
        """Equal for answers that say the same, when votes are counted: by default the answer as text."""
        return str(answer).strip()

    def claims(self, text: str) -> Collection[Hashable]:
        """What a text says that other branches may say too, such as numbers that it comes to: by default nothing."""
        return ()

    def verify(self, question: str, answer: Any) -> bool:
        """True where the task itself can tell that the answer solves the question."""
        return False

    def score(self, answer: Any | None, reference: Any) -> float:
        """How right an answer is, from 0 to 1: by default whether the texts are equal."""
        return float(answer is not None and self.canonical(answer) == self.canonical(reference))
