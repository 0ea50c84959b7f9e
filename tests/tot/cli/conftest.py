"""Shared helpers of the command line tests: a scripted decoder for GSM8K, and parsing of error lines.

They are fixtures because the import mode is importlib.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tot import State, Thought
from tot.tasks.gsm8k import GSM8K

USAGE = ["prompt_tokens", "reused_prompt_tokens", "new_tokens", "forwards", "drafted", "accepted", "seconds"]
USAGE += ["approximate_tokens", "undecoded_tokens", "reached", "forced_tokens", "masked_tokens"]


class Gsm8kScript(dict[str, Any]):
    """Replies to GSM8K's prompts by the end of the assistant prefix; the n-th sample gets the n-th text of a list."""

    def get(self, prompt: str, default: Any = None) -> Any:
        return next((reply for ending, reply in self.items() if prompt.endswith(ending)), default)


@pytest.fixture
def script() -> Gsm8kScript:
    thought = Thought(parts={"sub_question": "Q", "sub_answer": "A"})
    rated = GSM8K().prompt("value", State(question="q", thoughts=(thought,)))[-1].content
    return Gsm8kScript(
        {
            "Sub-question 1:": ["How many now?", "How many then?"],
            "How many now?\nSub-answer 1:": "3 + 4 = 7 apples.",
            "How many then?\nSub-answer 1:": "3 apples.",
            "Sub-question 2:": ["What else?", "What more?"],
            "Sub-answer 2:": "Nothing.",
            rated.splitlines()[-1]: "6",
            "The answer is": "7.",
        }
    )


@pytest.fixture
def scripted_model(script: Gsm8kScript, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The decoder that every run in this process gets."""
    decoder = scripted(script)
    monkeypatch.setattr("tot.decoders.engine.open_models.shared_engines", lambda *_, **__: nullcontext([None]))
    monkeypatch.setattr("tot.llm.decoders.load_decoder", lambda *_, **__: nullcontext(decoder))
    monkeypatch.setattr("tot.llm.decoders.has_chat_template", lambda _: False)
    return decoder


def refused(result: tuple[int, str, str]) -> str:
    """Return the single line on standard error of a rejected command."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert re.fullmatch(r"tot: [^\n]+\n", err)
    return err.removeprefix("tot: ").removesuffix("\n")


@pytest.fixture(name="refused")
def _refused() -> Callable[[tuple[int, str, str]], str]:
    return refused


@pytest.fixture
def usage_fields() -> list[str]:
    """The usage fields of --json, in order."""
    return USAGE
