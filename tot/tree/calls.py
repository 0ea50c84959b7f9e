"""Call: what a decoder was asked about a thought and what it replied; and how a tree's calls are saved.

Prompts of one tree begin alike, with the same examples and the same path: sorted, each is written as how much it shares
with the one before it, and its rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tot.decoders.request import Completion, Message, Part, Purpose, Request


class Call(BaseModel):
    """One sample of one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    purpose: Purpose
    template: str
    """The task's template that the prompt was made from."""
    prompt: tuple[Message, ...]
    output: str = ""
    """The reply as it came, before anything was read from it."""
    parts: tuple[Part, ...] = ()
    """Where the stretches of the reply came from, if the decoder says: exact, approximate, a parallel step."""
    choices: dict[str, float] = {}
    """Log-probability (nats) of each choice, where choices were scored."""


def calls_of(template: str, request: Request, completions: Sequence[Completion]) -> tuple[Call, ...]:
    """The calls that `completions` of a request with messages came from."""
    prompt = tuple(message for message in request.prompt if isinstance(message, Message))
    return tuple(
        Call(
            purpose=request.purpose,
            template=template,
            prompt=prompt,
            output=completion.text,
            parts=completion.parts,
            choices={
                choice: scored.total
                for choice, scored in zip(request.choices, completion.choice_logprobs, strict=False)  # none: it was cut
            },
        )
        for completion in completions
    )


def calls_to_json(calls: Mapping[int, Sequence[Call]]) -> dict[str, Any]:
    """Calls by node, as JSON data: `texts` are the prompts' as [characters shared with the one before, rest]."""
    texts = sorted({message.content for some in calls.values() for call in some for message in call.prompt})
    number = {text: i for i, text in enumerate(texts)}
    rests = []
    for before, text in zip(["", *texts], texts, strict=False):
        shared = _shared(before, text)
        rests.append([shared, text[shared:]])
    return {
        "texts": rests,
        "calls": {
            str(node): [
                call.model_dump(mode="json", exclude={"prompt"}, exclude_defaults=True)
                | {"prompt": [[message.role, number[message.content]] for message in call.prompt]}
                for call in some
            ]
            for node, some in calls.items()
        },
    }


def calls_from_json(
    texts: Sequence[tuple[int, str]], calls: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[int, list[Call]]:
    """The inverse of `calls_to_json`. Raises ValueError, KeyError, TypeError or IndexError for other data."""
    whole: list[str] = []
    for shared, rest in texts:
        whole.append((whole[-1][:shared] if whole else "") + rest)
    return {
        int(node): [
            Call.model_validate(
                call | {"prompt": [{"role": role, "content": whole[number]} for role, number in call["prompt"]]}
            )
            for call in some
        ]
        for node, some in calls.items()
    }


def _shared(a: str, b: str) -> int:
    """How many characters two texts have in common at their beginnings."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
