"""Call: the prompt and the reply of one sample, and the JSON format of a tree's calls.

The prompts of one tree share long prefixes (examples, path). They are sorted, and each is saved as the length of the
prefix it shares with the previous one, and the remaining text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tot.decoders.request import Message, Part, Purpose


class Call(BaseModel):
    """One sample of one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    purpose: Purpose
    template: str
    """The task's template that rendered the prompt."""
    prompt: tuple[Message, ...]
    output: str = ""
    """The reply as decoded, before parsing."""
    parts: tuple[Part, ...] = ()
    """Segments of the reply with their origin (exact, approximate, a parallel step), if the decoder reports them."""
    choices: dict[str, float] = {}
    """Log-probability (nats) of each choice, if choices were scored."""


def calls_to_json(calls: Mapping[int, Sequence[Call]]) -> dict[str, Any]:
    """Convert calls by node to JSON data. `texts` holds the messages as [characters shared with the previous, rest]."""
    texts = sorted({message.content for node_calls in calls.values() for call in node_calls for message in call.prompt})
    number = {text: i for i, text in enumerate(texts)}
    rests = []
    for before, text in zip(["", *texts], texts, strict=False):
        shared = _prefix_length(before, text)
        rests.append([shared, text[shared:]])
    return {
        "texts": rests,
        "calls": {
            str(node): [
                call.model_dump(mode="json", exclude={"prompt"}, exclude_defaults=True)
                | {"prompt": [[message.role, number[message.content]] for message in call.prompt]}
                for call in node_calls
            ]
            for node, node_calls in calls.items()
        },
    }


def calls_from_json(
    texts: Sequence[tuple[int, str]], calls: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[int, list[Call]]:
    """Convert JSON data back to calls by node. Raises ValueError, KeyError, TypeError or IndexError if invalid."""
    prompts: list[str] = []
    for shared, rest in texts:
        prompts.append((prompts[-1][:shared] if prompts else "") + rest)
    return {
        int(node): [
            Call.model_validate(
                call | {"prompt": [{"role": role, "content": prompts[number]} for role, number in call["prompt"]]}
            )
            for call in node_calls
        ]
        for node, node_calls in calls.items()
    }


def _prefix_length(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts, in characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
