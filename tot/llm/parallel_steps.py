"""Texts that consist of parallel steps (PDOS, Yu et al., 2025): their titles and bodies."""

from __future__ import annotations

from tot.decoders.request import Completion, Sampling

_TOKENS = 48
"""Maximum length of a step with its title, in tokens."""


def title(text: str) -> str:
    """Convert text to a title: one line, without characters that end a title."""
    return " ".join(text.replace(":", ",").replace("#", "").split())


def candidate(number: int) -> str:
    """Return the title of the step about a candidate, numbered from 1."""
    return f"Candidate {number}"


def with_room(sampling: Sampling, steps: int) -> Sampling:
    """Return the sampling options with tokens for `steps` more steps, and without stop strings, which end all steps."""
    return sampling.model_copy(update={"max_tokens": sampling.max_tokens + _TOKENS * steps, "stop": ()})


def bodies(completion: Completion) -> list[str]:
    """Return the text of each step after its title; empty if the decoder has no parallel steps."""
    return [part.text.partition(":")[2].strip() for part in completion.parts if part.kind == "step"]


def said(completion: Completion) -> str:
    """Return the text; for parallel steps, their bodies as paragraphs."""
    return "\n\n".join(filter(None, bodies(completion))) or completion.text


def conclusion(completion: Completion) -> str:
    """Return the text after the steps, or the whole text if it has no steps."""
    return completion.parts[-1].text if bodies(completion) else completion.text


def said_of(completion: Completion, title: str) -> list[str]:
    """Return the texts after a title: lines of the conclusion, last first, and then the step."""
    steps = (part.text for part in completion.parts if part.kind == "step")
    lines = [text.partition(":") for text in (*steps, *conclusion(completion).splitlines())]
    return [body.strip() for head, colon, body in reversed(lines) if colon and head.strip(" #*-") == title]
