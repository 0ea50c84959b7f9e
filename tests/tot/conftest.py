"""A scripted decoder, and a task whose prompts are paths in the tree.

Shared classes and factories are fixtures because the import mode is importlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tot import Task
from tot.decoders import Completion, Request, Usage

PATH = "{{ thoughts | map(attribute='thought') | join('/') }}"
TWO_LEVELS = {
    "grow": ["a", "b"],
    "value a": "3",
    "value b": "7",
    "grow b": ["c", "d"],
    "grow a": ["e", "f"],
    "value b/c": "2",
    "value b/d": "9",
    "value a/e": "9",
    "value a/f": "5",
    "answer b/d": "the end",
}
"""Replies to Letters with two thoughts a state: b is the better one, and d the best after b."""


class Letters(Task):
    """Prompts are a purpose and the path of thoughts: "grow b/c" asks for the thoughts after b and c."""

    templates: ClassVar = {"thought": f"grow {PATH}", "value": f"value {PATH}", "answer": f"answer {PATH}"}
    depth = 3


class Scripted:
    """A decoder that looks up replies by prompt and records its requests batch by batch.

    A table entry is a text, a list of texts (one a sample), or completions. A prompt that is missing in the table is
    its own reply. Every completion made from a text has `tokens` new tokens.
    """

    def __init__(self, replies: dict[str, Any], tokens: int = 5) -> None:
        self.replies = replies
        self.tokens = tokens
        self.batches: list[list[Request]] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        prompt = request.prompt[-1].content
        reply = self.replies.get(prompt, prompt)
        if isinstance(reply, list):
            reply = reply[sample]
        if isinstance(reply, Completion):
            return reply
        return self.completion(reply, new_tokens=self.tokens)

    @staticmethod
    def completion(text: str, reason: Any = "eos", new_tokens: int = 5, **fields: Any) -> Completion:
        return Completion(text, (), 0.0, reason, Usage(new_tokens=new_tokens), **fields)

    @property
    def requests(self) -> list[Request]:
        return [request for batch in self.batches for request in batch]

    @property
    def prompts(self) -> list[list[str]]:
        """The prompts of every batch."""
        return [[request.prompt[-1].content for request in batch] for batch in self.batches]


@pytest.fixture
def letters() -> type[Task]:
    return Letters


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def two_levels() -> dict[str, Any]:
    return dict(TWO_LEVELS)
