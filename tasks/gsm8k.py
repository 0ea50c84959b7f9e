"""GSM8K: grade-school word problems, solved by sub-questions and sub-answers (SEED, Appendix D)."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from tot import State
from tot.decoders.errors import TaskError
from tot.task.task import text_of
from tot.tasks.number_answers import (
    announced_answer,
    boxed_answer,
    complete,
    flexible_answer,
    same_number,
    strict_answer,
    value_of,
)
from tot.tasks.printed import PrintedAnswers

_WORD = re.compile(r"[^\W\d_]")


class GSM8K(PrintedAnswers):
    """Input: a word problem. Output: a number, as text.

    A thought is a sub-question and its sub-answer; its value, from 1 to 10, is how much it helps. T = 4: three levels
    of thoughts, then the answer. Score: 1 if the numbers are equal, else 0. `search="rap"` searches as
    RAP does. With aggregate="vote" the answers of all leaves vote, weighted by the values of their states. The template
    `program` asks for a Python program that prints the answer, which runs in a sandbox
    (Program of Thoughts, Chen et al., 2023).
    """

    name = "gsm8k"
    data_set = "openai/gsm8k:main:test"
    thought = ("sub_question", "sub_answer")
    depth = 4
    search = "bfs"
    triggers: ClassVar[Mapping[str, str]] = {
        "chain": "\nThe answer is",
        "sub_answer": " The answer is",
        "explain": "\nFrom 1 (no help) to 10 (great help), the number is:",
    }
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sub_question": {"max_tokens": 64, "stop": ("\n",)},
        "sub_answer": {"max_tokens": 96, "stop": ("\n",)},
        "propose": {"max_tokens": 128, "stop": ("\n\n", "Sub-answer")},
        "chain": {"max_tokens": 320, "stop": ("\n\n", "\nQuestion:")},
        "program": {"max_tokens": 320, "stop": ("\n```", "\nQuestion:")},
        "vote": {"max_tokens": 8, "stop": ("\n",)},
        "explain": {"max_tokens": 128, "stop": ("\n\n",)},
        "answer": {"max_tokens": 64, "stop": ("\n",)},
    }

    chat: ClassVar[Mapping[str, Any]] = {
        "thought": ("step",),
        "depth": 16,
        "triggers": {"chain": triggers["chain"]},
        "labels": {"Yes": 1.0, "No": 0.0},
        "sampling": {
            **{template: {"max_tokens": 512} for template in ("step", "chain", "answer")},
            "program": {"max_tokens": 512, "stop": ("\n```",)},
            "propose": {"max_tokens": 256},
            "vote": {"max_tokens": 8, "stop": ("\n",)},
            "explain": {"max_tokens": 256},
        },
        "search": "auto",
        "generator": "continue",
        "evaluator": "logprob",
        "filters": {"top_p": 0.8, "top_k": 20},
    }

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the row's answer: a number, or a solution that ends in one. Raises TaskError if it has no number."""
        reference = text_of(row["answer"], "answer")
        if self._expected(reference) is None:
            raise TaskError(f"its answer {reference!r:.60} has no number: give one, such as 18 or '#### 18'")
        return reference

    def variables(self, state: State) -> dict[str, Any]:
        return {**super().variables(state), "demonstrations": self.prompts.data("demonstrations")}

    def parse_thought(self, template: str, text: str) -> str | None:
        """Parse a thought. A sub-question ends at its question mark; without a question mark it is invalid."""
        if template == "sub_question":
            question, mark, _ = text.partition("?")
            text = question + mark if mark and _WORD.search(question) else ""
        return super().parse_thought(template, text)

    def parse_output(self, output: str) -> str | None:
        """Return the answer in the last line that a program prints."""
        return flexible_answer(output.rpartition("\n")[2])

    def is_answered(self, message: str) -> bool:
        lines = message[: message.rfind("\n") + 1]  # the model may continue the last line
        return strict_answer(lines, ending=False) is not None or boxed_answer(lines) is not None

    def parse_answer(self, text: str) -> str | None:
        return strict_answer(text) or flexible_answer(text)

    def parse_truncated(self, text: str) -> str | None:
        """Return only an announced answer: the last number of a truncated text is an intermediate result."""
        sentences = complete(text)
        return strict_answer(sentences, ending=False) or boxed_answer(text) or announced_answer(sentences)

    def candidate(self, state: State) -> str:
        """Return all steps: votes compare whole solutions, not last steps."""
        return state.text

    def canonical(self, answer: Any) -> Hashable:
        """Return the value of the answer's number, so that different notations are equal."""
        text = str(answer)
        value = value_of(text)
        if value is None and (number := flexible_answer(text)) is not None:
            value = value_of(number)
        return super().canonical(answer) if value is None else value

    def _expected(self, reference: str) -> str | None:
        return reference if value_of(reference) is not None else self.parse_answer(reference)

    def score(self, answer: str | None, reference: str | float) -> float:
        """Return 1 if the numbers are equal; `reference` is a number or a GSM8K solution that ends in `#### N`."""
        expected = self._expected(str(reference))  # some data sets have numbers, others texts
        return float(answer is not None and expected is not None and same_number(answer, expected))
