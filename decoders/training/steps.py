"""Texts that teach a model the format of parallel steps of PDOS (Yu et al., 2025), which does not train.

An answer in steps gives four texts: the whole answer; a skeleton after some of its titles; and two ends of the answer,
each from the title of a step on, since a parallel step has not seen the steps before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Annotated

from pydantic import BaseModel, Field

from tot.decoders.methods.steps_format import ELLIPSIS, END, MARKER, header
from tot.decoders.request import Message, Request

Text = Annotated[str, Field(min_length=1)]


class SteppedAnswer(BaseModel):
    """A question, and its answer in independent steps."""

    question: Text
    steps: Annotated[tuple[tuple[Text, str], ...], Field(min_length=3)]
    """Title and text of each step."""
    conclusion: str = ""


def step_texts(answers: Iterable[SteppedAnswer], seed: int) -> Iterator[tuple[Request, str]]:
    """Yield four pairs of a prompt and its expected continuation for each answer."""
    for number, answer in enumerate(answers):
        rng = random.Random(f"steps {seed} {number}")
        whole = "".join(f"{header(title)} {text}\n" for title, text in answer.steps) + END + answer.conclusion
        heads = [header(title) for title, _ in answer.steps]
        skeleton = "".join(f"{head}{ELLIPSIS}\n" for head in heads) + END
        begun = skeleton.index(heads[rng.randrange(1, len(heads))]) + len(MARKER)
        pairs = [("", whole), (skeleton[:begun], skeleton[begun:])]
        pairs += [(head, whole.partition(head)[2]) for head in rng.sample(heads[1:], 2)]
        for prefix, text in pairs:
            turns = [Message(role="user", content=answer.question)]
            turns += [Message(role="assistant", content=prefix)] if prefix else []
            yield Request(prompt=tuple(turns)), text
