"""Ways to answer that PDOS's Table 1 compares, and what is measured of each answer.

Normal decoding and PDOS of the very same prompt; the same two of a prompt that asks for drafts (CoD: chain-of-draft, Xu
et al., 2025); an outline whose points are then one batch (SoT: skeleton-of-thought, Ning et al., 2024). Every prompt
holds a worked example, which shows how steps are written, and is computed beforehand: the time is that of decoding.
Speed is tokens of the finished text a second, titles and markers among them and skeletons not: all are paid the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

from tot.bench.pdos_tasks import Example, Question
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.options import PDOSOptions, listed
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.request import Completion, Message, Request, Sampling

_DRAFTS = "Think in steps, and write of each step only a draft, of five words at most."
_OUTLINE = "Write only the outline of the answer: its points, numbered, of five words each at most."
_POINT = "This is the outline of the answer:\n{outline}\n\nWrite point {number} of it, and nothing else."


@dataclass(frozen=True)
class Answer:
    """An answer, and what it took."""

    text: str
    tokens: int
    """Of the text."""
    seconds: float
    slots: float
    """Most slots live at once, over what normal decoding of the same prompt and text takes."""
    steps: float = 0.0
    """A block, on average: that were decoded side by side."""
    inside: float | None = None
    """Tokens a second while they were."""
    kept_format: bool = False
    """The model wrote a skeleton of its own, of several steps, with nothing wrong."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Side:
    """A way to answer. What it is compared with, `base`, is normal decoding: of the same prompt where there is one."""

    name: str
    decoder: LocalDecoder
    base: str
    drafts: bool = False
    given: bool = False
    """The steps' titles are given."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def writes_skeletons(self) -> bool:
        return self.decoder.name == "pdos" and not self.given

    def messages(self, question: Question) -> tuple[Message, ...]:
        """The prompt: a worked example, and the question."""
        form = StepsFormat(PDOSOptions(), self.decoder.engine.codec)
        return _asked(question, _in_steps(question.example, form, self.drafts), _DRAFTS if self.drafts else "")

    def ask(self, question: Question) -> Answer:
        """Answer it, from a store that holds nothing but the prompt."""
        messages = self.messages(question)
        self._compute(messages)
        engine = self.decoder.engine
        began = time.perf_counter()
        text, prompt, steps = self._decode(question, messages)
        seconds = time.perf_counter() - began
        tokens = len(engine.codec.encode(text))
        account = engine.accounts["generate"]
        return Answer(
            text,
            tokens,
            seconds,
            engine.cache.peak_live / (prompt + tokens - 1),  # the last token's keys and values are of no use
            steps,
            account.block_tokens / account.block_seconds if account.block_seconds else None,
            self.writes_skeletons and steps > 1 and account.skeletons > account.broken == 0,
        )

    def _compute(self, messages: tuple[Message, ...]) -> None:
        engine = self.decoder.engine
        engine.call(engine.cache.clear)
        self.decoder.generate([Request(prompt=messages, sampling=Sampling(max_tokens=1))])
        engine.accounts.clear()
        engine.call(self._watch)

    def _watch(self) -> None:
        """Begin to look for the most slots that are live."""
        cache = self.decoder.engine.cache
        cache.peak_live = cache.live

    def _decode(self, question: Question, messages: tuple[Message, ...]) -> tuple[str, int, float]:
        """The text, the prompt's length, and how many steps a block had."""
        titles = question.titles if self.given else ()
        (got,) = self._generate([messages], question.tokens, titles)
        blocks = [len(list(parts)) for kind, parts in groupby(part.kind for part in got.parts) if kind == "step"]
        return got.text, got.usage.prompt_tokens, fmean(blocks) if blocks else 0.0

    def _generate(
        self, prompts: Sequence[tuple[Message, ...]], tokens: int, titles: tuple[str, ...] = ()
    ) -> list[Completion]:
        sampling = Sampling(max_tokens=tokens)
        return self.decoder.generate([Request(prompt=prompt, sampling=sampling, steps=titles) for prompt in prompts])


class OutlineFirst(Side):
    """Skeleton-of-thought: an outline, then all of its points as one batch, put one after another.

    The points' prompts hold the outline, so that computing them is part of the time.
    """

    def messages(self, question: Question) -> tuple[Message, ...]:
        example = question.example
        points = [*(step.title for step in example.steps), example.last]
        return _asked(question, _numbered(points), _OUTLINE)

    def _decode(self, question: Question, messages: tuple[Message, ...]) -> tuple[str, int, float]:
        (outline,) = self._generate([messages], question.tokens)
        points = listed(outline.text)[: question.tokens // question.step_tokens]
        if not points:  # no outline: what was written is all there is
            return outline.text, outline.usage.prompt_tokens, 0.0
        shown = _numbered(points)
        prompts = [
            (
                Message(role="user", content=f"{question.text}\n\n{_POINT.format(outline=shown, number=number)}"),
                Message(role="assistant", content=f"{number}. {point}:"),
            )
            for number, point in enumerate(points, 1)
        ]
        written = self._generate(prompts, question.step_tokens)
        lines = [
            f"{number}. {point}: {one.text.strip()}"
            for number, (point, one) in enumerate(zip(points, written, strict=True), 1)
        ]
        return "\n".join(lines), outline.usage.prompt_tokens, 0.0


def sides(normal: LocalDecoder, steps: LocalDecoder) -> list[Side]:
    """All of Table 1, from decoders `ar` and `pdos` of one engine: `pdos` with titles given and with its own skeletons.

    `pdos` is to add no instructions of its own, as the prompts show how steps are written.
    """
    return [
        Side("normal", normal, "normal"),
        Side("pdos, given", steps, "normal", given=True),
        Side("pdos, own", steps, "normal"),
        OutlineFirst("SoT", normal, "normal"),
        Side("CoD", normal, "normal", drafts=True),
        Side("CoD + pdos, given", steps, "CoD", drafts=True, given=True),
        Side("CoD + pdos, own", steps, "CoD", drafts=True),
    ]


def _asked(question: Question, answer: str, words: str) -> tuple[Message, ...]:
    """The worked example with `answer`, and the question; both after `words`."""
    example, asked = (f"{words}\n\n{text}".strip() for text in (question.example.text, question.text))
    return (
        Message(role="user", content=example),
        Message(role="assistant", content=answer),
        Message(role="user", content=asked),
    )


def _in_steps(example: Example, form: StepsFormat, drafts: bool) -> str:
    """The example's answer, in the format of steps."""
    steps = [f"{form.header(step.title)} {step.draft if drafts else step.whole}\n" for step in example.steps]
    return "".join(steps) + form.end_text + example.conclusion


def _numbered(points: Sequence[str]) -> str:
    return "\n".join(f"{number}. {point}" for number, point in enumerate(points, 1))
