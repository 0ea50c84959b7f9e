"""Task: what a user subclasses. Templates to ask with, and a few methods that read what comes back.

A task knows nothing of models, decoders or searches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar

from tot.decoders.errors import OptionError, TaskError, unknown
from tot.decoders.request import Message
from tot.state import State
from tot.templates import Templates


class Task:
    """A kind of problem.

    Input: a question (text). Output: an answer (text), found by growing thoughts, judging states on `scale`, and
    asking for the answer at the best one. The least a task needs is three templates, inline or as files:

        class Riddle(Task):
            templates = {
                "thought": "Riddle: {{ question }}\\nGive one more idea.",
                "value": "Riddle: {{ question }}\\nIdea: {{ thoughts[-1].thought }}\\nHow good is it, from 1 to 10?",
                "answer": "Riddle: {{ question }}\\nBest idea: {{ thoughts[-1].thought }}\\nAnswer in one word.",
            }

    A template sees `question`, `thoughts` (a mapping from template name to text for each thought so far) and whatever
    `variables` adds. Without blocks it is one user message; the blocks `system`, `user` and `assistant` make messages
    of their own, the last being a prefix that the model goes on writing.
    """

    name: ClassVar[str] = ""
    """Where the templates are looked up: a folder beside the task's file, then in the package; by default the class's
    name in snake_case."""
    templates: ClassVar[Mapping[str, str]] = {}
    """Inline templates by name; they go before files."""
    thought: ClassVar[tuple[str, ...]] = ("thought",)
    """Templates of one thought, asked in this order: each sees the outputs of those before it as variables."""
    value: ClassVar[str] = "value"
    answer: ClassVar[str] = "answer"
    depth: ClassVar[int] = 4
    """T: T - 1 levels of thoughts, then the answer."""
    scale: ClassVar[tuple[int, int]] = (1, 10)
    default_value: ClassVar[float] = 1.0
    """The value of a state whose evaluation can't be read."""
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sampling options by template name, such as {"thought": {"max_tokens": 64, "stop": ("\\n",)}}."""

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self) -> None:
        self._templates = Templates(self)

    def start(self, question: str) -> State:
        """The root state. Raises TaskError for a question that can't be one."""
        if not question.strip():
            raise TaskError("the question is empty: give some text")
        if any("\ud800" <= character <= "\udfff" for character in question):
            raise TaskError("the question is not Unicode text: give it in UTF-8")
        return State(question=question.strip())

    def variables(self, state: State) -> dict[str, Any]:
        """What templates see of a state."""
        return {"question": state.question, "thoughts": [thought.parts for thought in state.thoughts]}

    def prompt(self, template: str, state: State, /, **extra: Any) -> tuple[Message, ...]:
        """The messages of one call about `state`. Raises TaskError where `extra` would hide one of its variables."""
        variables = self.variables(state)
        if hidden := sorted(variables.keys() & extra.keys()):
            raise TaskError(
                f"task {type(self).__name__} has a thought template named {hidden[0]!r}, which would hide "
                "the variable of that name: rename it"
            )
        return self._templates.render(template, **variables, **extra)

    def data(self, name: str) -> Any:
        """The JSON file `name` that lies with the task's templates. Raises TaskError if there is none."""
        return self._templates.data(name)

    def example(self) -> str:
        """A question to try the task with: the first of its `questions` file."""
        return str(self.data("questions")[0]["question"])

    def parse_thought(self, template: str, text: str) -> str | None:
        """What is kept of a thought template's output; None rejects the thought."""
        return text.strip() or None

    def parse_value(self, text: str) -> float | None:
        """The value in an evaluator's reply: by default the first number on the scale; None if there is none."""
        low, high = self.scale
        numbers = (float(number) for number in re.findall(r"\d{1,9}(?:\.\d{1,9})?", text))
        return next((number for number in numbers if low <= number <= high), None)

    def is_terminal(self, state: State) -> bool:
        """True where no further thought is needed."""
        return False

    def parse_answer(self, text: str) -> str | None:
        """The answer in a text; None if there is none."""
        return text.strip() or None

    def verify(self, question: str, answer: str) -> bool:
        """True where the task itself can tell that the answer solves the question."""
        return False

    def score(self, answer: str | None, reference: str) -> float:
        """How right an answer is, from 0 to 1: by default whether the texts are equal."""
        return float(answer is not None and answer.strip() == reference.strip())


def load_task(task: Task | type[Task] | str) -> Task:
    """A task object from an object, a class, or the name of an installed one. Raises OptionError naming the choices."""
    if isinstance(task, Task):
        return task
    if isinstance(task, type) and issubclass(task, Task):
        return task()
    installed = {entry.name: entry for entry in entry_points(group="tot.tasks")}
    if task not in installed:
        raise OptionError(unknown("task", str(task), installed))
    cls: type[Task] = installed[task].load()
    return cls()
