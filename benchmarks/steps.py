"""The command `steps`: write texts that teach a model the format of parallel steps of PDOS (Yu et al., 2025).

A made-up question with its right answer gives four texts: the answer in steps; a skeleton after some of its titles; and
two ends of the answer, each from the title of a step on, since a parallel step has not seen the steps before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.pdos_questions import documents, retrieval
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.models.loading import load_model
from tot.decoders.request import Message, Request
from tot.decoders.training.cllm.trajectories import given
from tot.report.terminal import counting

_SIZES = range(4, 9)
"""Steps of a question."""


class Options(BaseModel):
    """Write made-up questions with answers in parallel steps, to train a model on the format of pdos."""

    out: Path = Field(description="The folder to write texts to; an incomplete one is resumed.")
    model: str = Field("smollm2-135m", description="The model to train: a name, a hub id or a folder.")
    questions: int = Field(200, ge=1, description="Number of questions, each with four texts.")


def run(asked: Options, _: Console) -> None:
    """Write the texts."""
    loaded = load_model(asked.model)
    with counting("writing", 4 * asked.questions) as report:
        texts = taught(asked.questions, TextCodec(loaded.tokenizer))
        given(loaded, texts, asked.out, lambda count: report(count, f"{count} texts"))


def taught(questions: int, codec: TextCodec) -> Iterator[tuple[Request, str]]:
    """Yield four pairs of a prompt and its expected continuation for each question.

    The questions differ from the ones of `python -m benchmarks pdos`, which have positive seeds.
    """
    form = StepsFormat(PDOSOptions(), codec)
    for number in range(questions):
        chance = random.Random(f"steps 0 {number}")
        question = chance.choice((retrieval, documents))(chance.choice(_SIZES), -chance.randrange(1, 10**9))
        assert question.answered is not None
        answer = question.answered.in_steps(form)
        heads = [form.header(title) for title in question.titles]
        skeleton = "".join(f"{head}{form.options.ellipsis}\n" for head in heads) + form.end_text
        begun = skeleton.index(heads[chance.randrange(1, len(heads))]) + len(form.options.marker)
        pairs = [("", answer), (skeleton[:begun], skeleton[begun:])]
        pairs += [(head, answer.partition(head)[2]) for head in chance.sample(heads[1:], 2)]
        for prefix, text in pairs:
            turns = [Message(role="user", content=question.text)]
            if prefix:
                turns.append(Message(role="assistant", content=prefix))
            yield Request(prompt=tuple(turns)), text
