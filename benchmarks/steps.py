"""The command `steps`: texts that teach a model the format of parallel steps of PDOS, for `tot train cllm`.

The questions are made up, with right answers in steps. An answer gives four texts: the whole answer; a skeleton after
some of its titles; and two ends of the answer, each from the title of a step on, since a parallel step has not seen the
steps before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.pdos_questions import PDOSQuestion, documents, retrieval
from benchmarks.texts import write_texts
from tot.decoders.methods.steps_format import ELLIPSIS, END, MARKER, header
from tot.decoders.models.loading import load_model
from tot.decoders.request import Message, Request
from tot.report.terminal import counting


class Options(BaseModel):
    """Write texts that teach a model the format of pdos, for tot train cllm."""

    out: Path = Field(description="The folder to write texts to; an incomplete one is resumed.")
    questions: int = Field(200, ge=1, description="Number of questions, each of four texts.")
    model: str = Field("smollm2-135m", description="A name, a hub id, a folder or a .gguf file.")
    seed: int = Field(0, ge=0, description="Seed of the parts of the answers.")


def run(asked: Options, _: Console) -> None:
    """Write the texts."""
    texts = (text for number in range(asked.questions) for text in step_texts(number, asked.seed))
    with counting("writing", 4 * asked.questions) as tell:
        write_texts(load_model(asked.model), texts, asked.out, lambda count: tell(count, f"{count} texts"))


def step_texts(number: int, seed: int) -> Iterator[tuple[Request, str]]:
    """Yield four pairs of a prompt and its expected continuation for a question."""
    question = made_up(number)
    answered = question.answered
    assert answered is not None
    rng = random.Random(f"steps {seed} {number}")
    whole = "".join(f"{header(title)} {text}\n" for title, text, _ in answered.steps) + END + answered.conclusion
    heads = [header(title) for title, _, _ in answered.steps]
    skeleton = "".join(f"{head}{ELLIPSIS}\n" for head in heads) + END
    begun = skeleton.index(heads[rng.randrange(1, len(heads))]) + len(MARKER)
    pairs = [("", whole), (skeleton[:begun], skeleton[begun:])]
    pairs += [(head, whole.partition(head)[2]) for head in rng.sample(heads[1:], 2)]
    for prefix, text in pairs:
        turns = [Message(role="user", content=answered.text)]
        turns += [Message(role="assistant", content=prefix)] if prefix else []
        yield Request(prompt=tuple(turns)), text


def made_up(number: int) -> PDOSQuestion:
    """Return a question of four to eight steps.

    It differs from the questions of `python -m benchmarks pdos`, which have positive seeds.
    """
    chance = random.Random(f"steps 0 {number}")
    return chance.choice((retrieval, documents))(chance.choice(range(4, 9)), -chance.randrange(1, 10**9))
