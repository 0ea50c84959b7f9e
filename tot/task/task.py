"""Task: the base class of user tasks, with prompt templates and methods that parse the replies.

A task does not depend on models, decoders or searches.
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
from tot.task.templates import Templates, joined
from tot.task.world import World
from tot.tree.thought import State


class Task(World, Dataset):
    """A kind of problem.

    Input: a question (text). Output: an answer. A search generates thoughts, evaluates states, and asks for the answer
    at the best state. A task needs at least three templates, inline or as files:

        class Riddle(Task):
            templates = {
                "thought": "Riddle: {{ question }}\\nGive one more idea.",
                "value": "Riddle: {{ question }}\\nIdea: {{ thoughts[-1].thought }}\\nHow good is it, from 1 to 10?",
                "answer": "Riddle: {{ question }}\\nBest idea: {{ thoughts[-1].thought }}\\nAnswer in one word.",
            }

    A template has the variables `question`, `thoughts` (a mapping from template name to text for each thought so far),
    `observations` (the result of each thought, if the task executes thoughts), and the ones that `variables` adds.
    Without blocks it is one user message. The blocks `system`, `user` and `assistant` make separate messages; text
    beside them belongs to the user's. The model continues the text of `assistant`.

    `World` documents tasks whose thoughts are actions (Blocksworld), `Dataset` the source of questions. Every method
    has a default, described in its docstring.
    """

    name: ClassVar[str] = "task"
    """Name of the template folder, beside the task's file or in the package; by default the class name in snake_case.

    Missing templates are looked up in the folders of the base classes."""
    templates: ClassVar[Mapping[str, str]] = {}
    """Inline templates by name, which take precedence over files. A subclass inherits its parent's."""
    thought: ClassVar[tuple[str, ...]] = ("thought",)
    """Templates of one thought, in order. Each has the outputs of the previous ones as variables."""
    propose: ClassVar[str] = "propose"
    """Template that asks for `count` next thoughts in one reply; `Propose` uses it instead of the first template of
    `thought`. The default is that template's prompt, with a request for `count` thoughts."""
    value: ClassVar[str] = "value"
    """Template of state evaluators. The parts of the last thought are variables."""
    values: ClassVar[str] = "values"
    """Template that asks for the values of several states at once; only `pdos` uses it.

    It has the variable `candidates`, like `vote`. The reply has a part for each state, titled "Candidate 1",
    "Candidate 2" and so on, and at the end all numbers."""
    vote: ClassVar[str] = "vote"
    """Template that compares states; `candidates` is a list of texts, which it numbers from 1. The default shows the
    question and the candidates, and asks which one is best."""
    chain: ClassVar[str] = "chain"
    """Template that asks for a whole solution at once; the baselines use it. A task without this template and without a
    world uses one thought, and then the answer."""
    programs: ClassVar[frozenset[str]] = frozenset()
    """Templates that ask for programs, which run in the sandbox."""
    answer: ClassVar[str] = "answer"
    triggers: ClassVar[Mapping[str, str]] = {}
    """Text that announces the answer, by template, such as {"chain": "\\nThe answer is"}. The text before it is a
    rationale, which a decoder such as `fastcot` may cut. With chat prompts only such a decoder uses it."""
    depth: ClassVar[int] = 4
    """T: T - 1 levels of thoughts, then the answer."""
    scale: ClassVar[tuple[int, int]] = (1, 10)
    """The lowest and the highest value, as integers."""
    labels: ClassVar[Mapping[str, float]] = {}
    """Words that an evaluation may use instead of a number, with their values: {"good": 1, "bad": 0}."""
    default_value: ClassVar[float] = 1.0
    """The value of a state whose evaluation can't be parsed."""
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sampling options by template name, such as {"thought": {"max_tokens": 64, "stop": ("\\n",)}}."""
    filters: ClassVar[Mapping[str, float]] = {}
    """Default sampling filters, if neither the run nor the model sets them: {"top_p": 0.8, "top_k": 20}."""
    chat: ClassVar[Mapping[str, Any]] = {}
    """Attributes to override for a chat model that is prompted in its own format. Its templates are in the subfolder
    `chat`. Empty if the task has no prompts for chat models."""
    prompts: ClassVar[Literal["papers", "chat"]] = "papers"
    """The set of prompts in use."""
    verdict: ClassVar[str] = "verified"
    """Word for an answer that `verify` accepts. Another word than the default stands for a check of a part, such as
    examples, after which the answer's certainty is not 1."""
    version: str = ""
    """Identifies the files that results depend on, such as a scorer. Only a run of the same version can be resumed."""
    search: ClassVar[str] = "bfs"
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
        self._templates = Templates(type(self), self.templates)
        self._papers: Self | None = None
        self._history: tuple[Message, ...] = ()

    def in_chat(self) -> Self:
        """Return the task with its prompts for chat models. Raises OptionError if it has no such prompts."""
        if not self.chat:
            raise OptionError(f"task {type(self).__name__} has no prompts for chat models: leave prompts='chat' out")
        if self.prompts == "chat":
            return self
        other = copy(self)
        vars(other).update(self.chat, prompts="chat")
        other._templates = Templates(type(other), other.templates, "chat")
        other._papers = self
        return other

    def after(self, history: Sequence[Message]) -> Self:
        """Return the task with questions that follow these messages: a system message, and earlier turns."""
        other = copy(self)
        other._history = tuple(history)
        return other

    def in_papers(self) -> Self:
        """Return the task with our few-shot prompts, in the papers' form."""
        return self._papers or self

    def start(self, question: str) -> State:
        """Return the root state. Raises TaskError for a question that is empty or not Unicode text."""
        question = question.strip().removeprefix("\ufeff")
        if not question.strip():
            raise TaskError("the question is empty: give some text")
        if any("\udc80" <= character <= "\udcff" for character in question):  # bytes that Python could not decode
            raise TaskError("the question is not Unicode text: give it in UTF-8")
        return State(question=in_unicode(question.strip()))

    def variables(self, state: State) -> dict[str, Any]:
        """Return the template variables of a state."""
        observations = [None if thought.observation is None else thought.observation.text for thought in state.thoughts]
        parts = [thought.parts for thought in state.thoughts]
        return {"question": state.question, "thoughts": parts, "observations": observations}

    def prompt(self, template: str, state: State, /, **extra: Any) -> tuple[Message, ...]:
        """Render a template for a state. Raises TaskError if `extra` would hide one of the state's variables."""
        variables = self.variables(state)
        if hidden := sorted(variables.keys() & extra.keys()):
            raise TaskError(
                f"task {type(self).__name__} has a thought template named {hidden[0]!r}, which would hide "
                "the variable of that name: rename it"
            )
        # Variables of the default templates in prompts/task.
        about: dict[str, Any] = {"thought_template": next(iter(self.thought), "thought"), "value_template": self.value}
        about["labels"] = list(self.labels) or ["Yes", "No"]
        return joined(self._history, self._templates.render(template, **{**about, **variables, **extra}))

    def has_template(self, template: str) -> bool:
        return template in self._templates

    def has_default(self, template: str) -> bool:
        """Return whether a template is the default of all tasks (`prompts/task`)."""
        return self._templates.is_default(template)

    def require(self, *templates: str) -> None:
        """Raise TaskError for the first of `templates` that is missing."""
        for template in templates:
            self._templates.require(template)

    def trigger(self, template: str, cut: bool = False) -> str | None:
        """Return the text between a template's rationale and its answer; None if the text is decoded in one piece.

        Chat models announce their answers themselves. They need the trigger only if the decoder may `cut` rationales.
        """
        return self.triggers.get(template) if cut or self.prompts == "papers" else None

    def steps(self, template: str, state: State) -> Sequence[str]:
        """Return the titles of independent parts of a template's text; by default empty.

        `pdos` decodes the parts in parallel, other decoders one after another.
        """
        return ()

    def hints(self, state: State) -> Sequence[str]:
        """Return directions for the next thought: one of them, chosen by the seed, is appended to each prompt.

        They make samples differ. The default is empty.
        """
        return ()

    def data(self, name: str) -> Any:
        """Return the JSON file `name` from the task's template folder. Raises TaskError if it is missing."""
        return self._templates.data(name)

    def parse_thought(self, template: str, text: str) -> str | None:
        """Return the thought in a template's output, or None to reject it."""
        return text.strip() or None

    def parse_proposals(self, text: str) -> list[str]:
        """Return the thoughts that one reply lists: by default its list items, or its lines."""
        return parsing.parse_proposals(text)

    def parse_value(self, text: str) -> float | None:
        """Return the value in an evaluator's reply: by default the number on the scale, or None."""
        return parsing.parse_value(text, *self.scale)

    def candidate(self, state: State) -> str:
        """Return the text of a state in a vote: by default its last thought."""
        return state.thoughts[-1].text

    def parse_vote(self, text: str, candidates: int) -> int | None:
        """Return the candidate that a reply votes for, from 1 to `candidates`, or None."""
        return parsing.parse_vote(text, candidates)

    def is_answered(self, message: str) -> bool:
        """Return whether an unfinished message already contains its answer, so that decoding can stop."""
        return False

    def parse_answer(self, text: str) -> Any | None:
        """Return the answer in a text, or None."""
        return text.strip() or None

    def parse_truncated(self, text: str) -> Any | None:
        """Return the answer in a text that the token limit ended: by default as `parse_answer` does.

        If `parse_answer` guesses, for example by taking the last number, accept only an announced answer here.
        """
        return self.parse_answer(text)

    def choices(self, state: State) -> Sequence[str]:
        """Return the answers to choose from. If not empty, the most likely one after the answer template is used."""
        return ()

    def canonical(self, answer: Any) -> Hashable:
        """Return a key that equivalent answers share when votes are counted: by default the answer as text."""
        return str(answer).strip()

    def claims(self, text: str) -> Collection[Hashable]:
        """Return claims of a text to compare with other branches, such as computed numbers; by default empty."""
        return ()

    def verify(self, question: str, answer: Any) -> bool:
        """Return whether the answer verifiably solves the question; by default False."""
        return False

    def score(self, answer: Any | None, reference: Any) -> float:
        """Return the score of an answer, from 0 to 1: by default whether the texts are equal."""
        return float(answer is not None and self.canonical(answer) == self.canonical(reference))
