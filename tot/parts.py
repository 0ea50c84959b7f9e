"""Texts that consist of parallel steps (PDOS, Yu et al., 2025): titles to ask with, and what stands under them."""

from __future__ import annotations

from tot.decoders.request import Completion

TOKENS = 48
"""Room for a step that judges a candidate, its title among it."""


def title(text: str) -> str:
    """Text as a title, on one line and without what would end it early."""
    return " ".join(text.replace(":", ",").replace("#", "").split())


def bodies(completion: Completion) -> list[str]:
    """What stands under each step's title; none where the decoder knows of no steps."""
    return [part.text.partition(":")[2].strip() for part in completion.parts if part.kind == "step"]


def said(completion: Completion) -> str:
    """The text; of parallel steps what they say, as paragraphs."""
    return "\n\n".join(filter(None, bodies(completion))) or completion.text


def conclusion(completion: Completion) -> str:
    """What comes after the steps; the whole text where there are none."""
    return completion.parts[-1].text if bodies(completion) else completion.text
