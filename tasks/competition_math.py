r"""Competition mathematics (MATH, Hendrycks et al., 2021): the answer is a formula in `\boxed{}`."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from tot import State
from tot.task.checked import CheckedTask
from tot.task.task import text_of
from tot.tasks.formulas import boxed, key, read, same
from tot.tasks.gsm8k import GSM8K
from tot.tree.thought import Observation, Thought

_LONGER = {template: {"max_tokens": 1024} for template in ("step", "chain", "answer")}


class Math(GSM8K):
    """Input: a problem. Output: a number or another formula, as LaTeX.

    Thoughts, values, programs and defaults are as in GSM8K. Formulas are compared by math-verify: `0.5`, `1/2` and
    `\\frac{2}{4}` are one answer. Score: 1 if the formulas are equal, else 0.
    """

    name = "math"
    data_set = "HuggingFaceH4/MATH-500:test"
    chat: ClassVar[Mapping[str, Any]] = {**GSM8K.chat, "sampling": {**GSM8K.chat["sampling"], **_LONGER}}

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the row's answer; of a whole solution, the formula in its box."""
        answer = text_of(row["answer"], "answer")
        return boxed(answer) or answer

    def is_answered(self, message: str) -> bool:
        return boxed(message[: message.rfind("\n") + 1]) is not None  # the model may continue the last line

    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Run a program. Read any other answer in a thread, so that a hard formula stops no other search."""
        observation = await super().act(state, thought)
        if observation is None:
            await asyncio.to_thread(CheckedTask(self).answer_at, state.then(thought))
        return observation

    def parse_answer(self, text: str) -> str | None:
        return _keyed(read(text))

    def parse_truncated(self, text: str) -> str | None:
        return _keyed(boxed(text))

    def parse_output(self, output: str) -> str | None:
        """Return the formula in the last line that a program prints, without words such as "Answer:" before it."""
        line = output.rpartition("\n")[2].strip().strip("$")
        return _keyed((read(line) if ":" in line or " is " in line else line) or None)

    def canonical(self, answer: Any) -> Hashable:
        return key(str(answer))

    def score(self, answer: str | None, reference: Any) -> float:
        return float(answer is not None and same(str(answer), str(reference)))


def _keyed(answer: str | None) -> str | None:
    """Return an answer, whose key is now cached: a later vote does not wait for it."""
    if answer is not None:
        key(answer)
    return answer
