"""Task: the base class of user tasks, with prompt templates and methods that parse and score the replies.

A task does not depend on models, decoders or searches.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal, Self

from tot.decoders.constraint import Constraint
from tot.decoders.errors import OptionError, TaskError
from tot.decoders.request import Message, in_unicode
from tot.task import parsing
from tot.task.templates import Templates, joined
from tot.tree.thought import State, Thought, to_text


class Task:
    """A kind of problem.

    Input: a question (text). Output: an answer. A search generates thoughts, evaluates states, and asks for the answer
    at the best state. A task needs at least three templates, inline or as files:

        class Riddle(Task):
            templates = {
                "thought": "Riddle: {{ question }}\\nGive one more idea.",
                "value": "Riddle: {{ question }}\\nIdea: {{ thoughts[-1].thought }}\\nHow good is it, from 1 to 10?",
                "answer": "Riddle: {{ question }}\\nBest idea: {{ thoughts[-1].thought }}\\nAnswer in one word.",
            }

    A template has the variables `question`, `thoughts` (the texts or objects of each thought so far by template name),
    `observations` (the result of each thought, if the task executes thoughts), and the ones that `variables` adds.
    Without blocks it is one user message. The blocks `system`, `user` and `assistant` make separate messages; text
    beside them belongs to the user's. The model continues the text of `assistant`.

    Searches use these templates:

    - the templates of `thought`, in order: one thought;
    - `propose`: asks for `count` next thoughts in one reply. By default the first template of `thought`, with a request
      for `count` thoughts;
    - `value`: asks an evaluator for the value of a state. The parts of the last thought are variables;
    - `vote`: compares states, the texts `candidates`, which it numbers from 1. The default asks which one is best;
    - `chain`: asks for a whole solution at once; the baselines use it. A task without this template and without a world
      uses one thought, and then the answer;
    - `answer`: asks for the answer at a state that does not contain it.

    Every method has a default. `World` documents the methods that a task may add, for example if its thoughts are
    actions.
    """

    name: ClassVar[str] = "task"
    """Name of the template folder, beside the task's file or in the package; by default the class name in snake_case.

    Missing templates are looked up in the folders of the base classes."""
    templates: ClassVar[Mapping[str, str]] = {}
    """Inline templates by name, which take precedence over files. A subclass inherits its parent's."""
    thought: ClassVar[tuple[str, ...]] = ("thought",)
    """Templates of one thought, in order. Each has the outputs of the previous ones as variables."""
    triggers: ClassVar[Mapping[str, str]] = {}
    """Text that announces the answer, by template, such as {"chain": "\\nThe answer is"}. The text before it is a
    rationale, which a decoder such as `fastcot` may cut. With chat prompts only such a decoder uses it."""
    depth: ClassVar[int] = 4
    """T: T - 1 levels of thoughts, then the answer."""
    scale: ClassVar[tuple[float, float]] = (1, 10)
    """The lowest and the highest value; integers if the task has no `labels`. A state whose evaluation can't be parsed
    has the lowest."""
    labels: ClassVar[Mapping[str, float]] = {}
    """Words that an evaluation may use instead of a number, with their values: {"good": 1, "bad": 0}."""
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sampling options by template name, such as {"thought": {"max_tokens": 64, "stop": ("\\n",)}}."""
    schemas: ClassVar[Mapping[str, Any]] = {}
    """The type of the model's texts, by template: a type that pydantic describes ({"answer": int}), written as JSON, or
    a Constraint. Decoders write only such texts if they can; other texts are parse failures. The object is in
    `thought.objects`, and `parse_answer`, `parse_value`, `parse_vote` and `parse_proposals` get it instead of the
    text."""
    filters: ClassVar[Mapping[str, float]] = {}
    """Default sampling filters, if neither the run nor the model sets them: {"top_p": 0.8, "top_k": 20}."""
    chat: ClassVar[Mapping[str, Any]] = {}
    """Attributes to override for a chat model that is prompted in its own format. Its templates are in the subfolder
    `chat`. Empty if the task has no prompts for chat models."""
    verdict: ClassVar[str] = "verified"
    """Word for an answer that `verify` accepts. Another word than the default stands for a check of a part, such as
    examples, after which the answer's certainty is not 1."""
    variants: ClassVar[str] = ""
    """Option of `__init__` that the word after the task's name sets, as in "reasoning-gym:countdown". It and the other
    options must not name code."""
    search: ClassVar[str] = "auto"
    """The default search, thought generator and state evaluator of `solve`, by name, with options after a colon:
    "mcts:iterations=20,exploration=2"."""
    generator: ClassVar[str] = "sample"
    evaluator: ClassVar[str] = "likelihood"

    def __init_subclass__(cls) -> None:
        if "chat" not in cls.__dict__ and {"templates", "thought"} & cls.__dict__.keys():
            cls.chat = {}  # the parent's chat prompts would hide the subclass's own
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self) -> None:
        self.prompts = Templates(type(self), self.templates)
        """The templates, and the JSON files beside them."""
        self._papers: Self | None = None
        self._history: tuple[Message, ...] = ()
        self.turns: tuple[Thought, ...] = ()
        """Turns of the assistant after the question, with which a search begins."""
        self.form: Constraint | None = None
        """The form of answers, if it is not the task's own."""

    def with_prompts(
        self,
        kind: Literal["papers", "chat"] | None = None,
        history: Sequence[Message] = (),
        turns: Sequence[Thought] = (),
        form: Constraint | None = None,
    ) -> Self:
        """Return the task with other prompts. Raises OptionError if it has no prompts for chat models.

        Args:
            kind: "papers" for our few-shot prompts, in the papers' form; "chat" for the prompts for chat models.
            history: Messages that the questions follow: a system message, and earlier turns.
            turns: Turns of the assistant after the questions: calls of functions with their results.
            form: The form of answers, and of the texts that give them.
        """
        other = copy((self._papers or self) if kind == "papers" else self)
        if kind == "chat" and self.prompts.kind != "chat":
            if not self.chat:
                name = type(self).__name__
                raise OptionError(f"task {name} has no prompts for chat models: leave prompts='chat' out")
            vars(other).update(self.chat)
            other.prompts = Templates(type(self), other.templates, "chat")
            other._papers = self
        other._history = tuple(history) or self._history
        other.turns = tuple(turns) or self.turns
        other.form = form or self.form
        if form is not None:
            names = (*self.thought, "chain", "answer")
            typed = {name: form for name in names if name in other.prompts}
            vars(other).update(schemas={**self.schemas, **typed})
        return other

    # -- questions --

    def example(self) -> str:
        """Return a sample question: the first in the `questions` file."""
        return self.question_of(self.prompts.data("questions")[0])

    def question_of(self, row: Mapping[str, Any]) -> str:
        """Return the question of a row: by default its `question`. Raises TaskError if it is not text."""
        return text_of(row["question"])

    def reference_of(self, row: Mapping[str, Any]) -> Any:
        """Return the reference to score answers against: by default the row's `answer`."""
        return row["answer"]

    def start(self, question: str) -> State:
        """Return the root state. Raises TaskError for a question that is empty or not Unicode text."""
        question = question.strip().removeprefix("\ufeff").strip()
        if not question:
            raise TaskError("the question is empty: give some text")
        if any("\udc80" <= character <= "\udcff" for character in question):  # bytes that Python could not decode
            raise TaskError("the question is not Unicode text: give it in UTF-8")
        return State(question=in_unicode(question))

    # -- prompts --

    def variables(self, state: State) -> dict[str, Any]:
        """Return the template variables of a state."""
        observations = [None if thought.observation is None else thought.observation.text for thought in state.thoughts]
        outputs = [thought.outputs for thought in state.thoughts]
        return {"question": state.question, "thoughts": outputs, "observations": observations}

    def prompt(self, template: str, state: State, /, **extra: Any) -> tuple[Message, ...]:
        """Render a template for a state. Raises TaskError if `extra` would hide one of the state's variables."""
        variables = self.variables(state)
        if hidden := sorted(variables.keys() & extra.keys()):
            raise TaskError(
                f"task {type(self).__name__} has a thought template named {hidden[0]!r}, which would hide "
                "the variable of that name: rename it"
            )
        # Variables of the default templates in prompts/task.
        about = {"thought_template": next(iter(self.thought), "thought"), "labels": list(self.labels) or ["Yes", "No"]}
        return joined(self._history, self.prompts.render(template, **{**about, **variables, **extra}))

    # -- replies --

    def parse_thought(self, template: str, text: str) -> str | None:
        """Return the thought in a template's output, or None to reject it."""
        return text.strip() or None

    def parse_proposals(self, text: str) -> list[str]:
        """Return the thoughts that one reply lists: by default its list items, or its lines."""
        return [to_text(one) for one in text] if isinstance(text, list) else parsing.parse_proposals(text)

    def parse_value(self, text: str) -> float | None:
        """Return the value in an evaluator's reply: by default the number on the scale, or None."""
        return parsing.parse_value(to_text(text), *self.scale)

    def parse_vote(self, text: str, candidates: int) -> int | None:
        """Return the candidate that a reply votes for, from 1 to `candidates`, or None."""
        return parsing.parse_vote(to_text(text), candidates)

    def parse_answer(self, text: Any) -> Any | None:
        """Return the answer in a text, or in the object of a template with a schema; None without one."""
        return text.strip() or None if isinstance(text, str) else text

    # -- scoring --

    def canonical(self, answer: Any) -> Hashable:
        """Return a key that equivalent answers share when votes are counted: by default the answer as text.

        The text of an object is its JSON with sorted keys.
        """
        return to_text(answer, canonical=True).strip()

    def verify(self, question: str, answer: Any) -> bool:
        """Return whether the answer verifiably solves the question; by default False."""
        return False

    def score(self, answer: Any | None, reference: Any) -> float:
        """Return the score of an answer, from 0 to 1: by default whether the texts are equal."""
        return float(answer is not None and self.canonical(answer) == self.canonical(reference))


def text_of(value: Any, what: str = "question") -> str:
    """Return a row's value as text. Raises TaskError for a list, a mapping, a boolean or NaN."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise TaskError(f"its {what} is {value!r:.60}, not text: give text in quotation marks")
    return str(value)


def answer_text(answer: Any) -> str:
    """Return an answer as text: the actions of a plan in one line."""
    return "  ".join(map(str, answer)) if isinstance(answer, list | tuple) else to_text(answer)
