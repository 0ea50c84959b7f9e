"""Texts that consist of parallel steps (PDOS, Yu et al., 2025): titles to ask with, and what stands under them."""

from __future__ import annotations

from tot.decoders.request import Completion, Sampling

_TOKENS = 48
"""Room for a step, its title among it."""


def title(text: str) -> str:
    """Text as a title, on one line and without what would end it early."""
    return " ".join(text.replace(":", ",").replace("#", "").split())


def candidate(number: int) -> str:
    """The title of what is said about a candidate, numbered from 1."""
    return f"Candidate {number}"


def with_room(sampling: Sampling, steps: int) -> Sampling:
    """With tokens for so many steps besides, and without stop strings, which would end all of them."""
    return sampling.model_copy(update={"max_tokens": sampling.max_tokens + _TOKENS * steps, "stop": ()})


def bodies(completion: Completion) -> list[str]:
    """What stands under each step's title; none where the decoder knows of no steps."""
    return [part.text.partition(":")[2].strip() for part in completion.parts if part.kind == "step"]


def said(completion: Completion) -> str:
    """The text; of parallel steps what they say, as paragraphs."""
    return "\n\n".join(filter(None, bodies(completion))) or completion.text


def conclusion(completion: Completion) -> str:
    """What comes after the steps; the whole text where there are none."""
    return completion.parts[-1].text if bodies(completion) else completion.text


def said_of(completion: Completion, title: str) -> list[str]:
    """What a text says under a title: in the last line of its conclusion that begins with it, and in its step."""
    steps = (part.text for part in completion.parts if part.kind == "step")
    lines = [text.partition(":") for text in (*steps, *conclusion(completion).splitlines())]
    return [said.strip() for head, colon, said in reversed(lines) if colon and head.strip(" #*-") == title]
