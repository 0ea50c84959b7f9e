"""`tot bench pdos`: parallel steps against normal decoding, in the shape of PDOS's Table 1 (Yu et al., 2025).

Normal decoding and PDOS of the very same prompt; the same two of a prompt that asks for drafts (CoD: chain-of-draft, Xu
et al., 2025); an outline whose points are then one batch (SoT: skeleton-of-thought, Ning et al., 2024). Prompts say how
steps are written, by the skeleton prompt (PDOS, appendix A), a worked example or both, and are computed beforehand: the
time is that of decoding, at temperature 0. Tokens are those of the finished text, skeletons not among them; titles and
markers are left out of what is said. Slots are the most keys and values held at once, over those that normal decoding
of the same text takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import fmean

from rich.console import Console

from tot.bench.engines import about, forget, metrics_of
from tot.bench.harness import Bench, Measured, Metric, Side, percent, plain, timed
from tot.bench.options import PDOSBench as Asked
from tot.bench.papers.pdos_questions import Example, PDOSQuestion, listed, multi_document, planning, retrieval
from tot.decoders.decoder import Decoder, LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.request import Message, Request, Sampling
from tot.evaluators.likelihood import expected

MARKS = (1, 2, 3, 4, 5)
_DRAFTS = "Think in steps, and write of each step only a draft, of five words at most."
_OUTLINE = "Write only the outline of the answer: its points, numbered, of five words each at most."
_POINT = "This is the outline of the answer:\n{outline}\n\nWrite point {number} of it, and nothing else."
_RUBRIC = """\
You mark answers. Take account of whether the answer is right, of how much it helps, and of how well it reads:
1 - wrong or of no use, or unreadable.
2 - wrong in the main, or of little use, or hard to read.
3 - right in the main and of some use, readable.
4 - right and of use, with small faults.
5 - right in all it says, complete, clear and in good order."""
METRICS = [
    Metric("seconds", lambda took: took["seconds"], plain(".1f"), less=True),
    Metric("new tokens/s", lambda took: took["tokens"] / took["seconds"], plain(".1f")),
    Metric("said, tokens/s", lambda took: took["said"] / took["seconds"], plain(".1f")),
    Metric("right", lambda took: took["right"], percent),
    Metric("mark", lambda took: took["mark"], plain(".2f")),
    Metric("slots", lambda took: took["slots"], plain(".3f")),
    Metric("format kept", lambda took: took["kept_format"], percent),
]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Way:
    """A way to answer: a decoder, whether steps are drafts, and whether the steps' titles are given."""

    name: str
    decoder: LocalDecoder
    drafts: bool = False
    given: bool = False
    outline: bool = False
    """Skeleton-of-thought: an outline, then all of its points as one batch, put one after another. The points' prompts
    hold the outline, so that computing them is part of the time."""
    prompt: str = "both"
    """How steps are shown, as `PDOSOptions.prompt` says."""

    @property
    def form(self) -> StepsFormat:
        return StepsFormat(PDOSOptions(), self.decoder.engine.codec)

    def messages(self, question: PDOSQuestion) -> Messages:
        """The prompt: how steps are written, and the question."""
        example, form, words = question.example, self.form, _DRAFTS if self.drafts else ""
        answer = _in_steps(example, form, self.drafts)
        shown, told = self.prompt != "skeleton", self.prompt != "example"
        if self.outline:
            answer = _numbered([*(title for title, _, _ in example.steps), example.last])
            shown, told, words = True, False, _OUTLINE
        turns = [
            Message(role="user", content=f"{words}\n\n{text}".strip())
            for text in ([example.text, question.text] if shown else [question.text])
        ]
        if told:
            turns[0] = Message(role="user", content=f"{form.instructions()}\n\n{turns[0].content}")
        return (turns[0], Message(role="assistant", content=answer), *turns[1:]) if shown else tuple(turns)

    def ask(self, question: PDOSQuestion) -> Measured:
        """Answer it, from a store that holds nothing but the prompt."""
        messages, engine = self.messages(question), self.decoder.engine
        forget(self.decoder)
        self.decoder.generate([Request(prompt=messages, sampling=Sampling(max_tokens=1))])
        engine.call(engine.accounts.clear)
        engine.call(partial(_watch, engine))
        seconds, (text, prompt, steps) = timed(lambda: self._decode(question, messages))
        tokens = len(engine.codec.encode(text))
        account = metrics_of(engine)
        kept = steps > 1 and account.skeletons > account.broken == 0
        return {
            "seconds": seconds,
            "tokens": tokens,
            "said": len(engine.codec.encode(said(text, self.form))),
            "text": text,
            "slots": engine.cache.peak_live / (prompt + tokens - 1),  # the last token's keys and values are of no use
            "steps": steps,
            "kept_format": float(kept) if self.decoder.name == "pdos" and not self.given else None,
        }

    def _decode(self, question: PDOSQuestion, messages: Messages) -> tuple[str, int, float]:
        """The text, the prompt's length, and how many steps a block had on average."""
        sampling = Sampling(max_tokens=question.tokens)
        titles = question.titles if self.given else ()
        (got,) = self.decoder.generate([Request(prompt=messages, sampling=sampling, steps=titles)])
        text, prompt = got.text, got.usage.prompt_tokens
        if not self.outline:
            blocks = [len(list(parts)) for kind, parts in groupby(part.kind for part in got.parts) if kind == "step"]
            return text, prompt, fmean(blocks) if blocks else 0.0
        points = listed(text)[: question.tokens // question.step_tokens]
        if points:  # without an outline what was written is all there is
            text = "\n".join(self._write(question, points))
        return text, prompt, 0.0

    def _write(self, question: PDOSQuestion, points: Sequence[str]) -> list[str]:
        """Every point of an outline, written out."""
        sampling, shown = Sampling(max_tokens=question.step_tokens), _numbered(points)
        heads = [f"{number}. {point}:" for number, point in enumerate(points, 1)]
        asked = [f"{question.text}\n\n{_POINT.format(outline=shown, number=i)}" for i in range(1, len(points) + 1)]
        prompts = [
            (Message(role="user", content=text), Message(role="assistant", content=head))
            for text, head in zip(asked, heads, strict=True)
        ]
        written = self.decoder.generate([Request(prompt=prompt, sampling=sampling) for prompt in prompts])
        return [f"{head} {one.text.strip()}" for head, one in zip(heads, written, strict=True)]


def said(text: str, form: StepsFormat) -> str:
    """A text without titles, numbers and markers."""
    marker, colon = re.escape(form.options.marker), re.escape(form.options.colon)
    title = rf"(?:{marker}|\d{{1,3}}\.)[^\n]*?{colon}|{re.escape(form.end_text.strip())}"
    return re.sub(rf"^[ \t]*(?:{title})[ \t]*", "", text, flags=re.MULTILINE)


def ways(normal: LocalDecoder, steps: LocalDecoder, prompt: str = "both") -> list[Way]:
    """All of Table 1, from decoders `ar` and `pdos` of one engine: `pdos` with titles given and with its own skeletons.

    `pdos` is to add no instructions of its own, as the prompts say how steps are written.
    """
    found = [
        Way("normal", normal),
        Way("pdos, given", steps, given=True),
        Way("pdos, own", steps),
        Way("SoT", normal, outline=True),
        Way("CoD", normal, drafts=True),
        Way("CoD + pdos, given", steps, drafts=True, given=True),
        Way("CoD + pdos, own", steps, drafts=True),
    ]
    return [replace(way, prompt=prompt) for way in found]


def run(asked: Asked, console: Console) -> None:
    """Measure, and print a table for each kind of question."""
    with ExitStack() as stack:
        normal = stack.enter_context(load_decoder("ar", asked.model, **asked.computed))
        steps = stack.enter_context(load_decoder("pdos", engine=normal.engine, instructions=""))
        judge = normal
        if asked.judge is not None:
            judge = stack.enter_context(load_decoder("ar", asked.judge, **asked.computed))
        bench = stack.enter_context(Bench(asked, console, f"{asked.model}; {about(normal.engine)}"))
        compared = ways(normal, steps, asked.prompt)

        def answered(way: Way, question: PDOSQuestion) -> Measured:
            """With what the answer is worth, which takes no counted time."""
            took = way.ask(question)
            right = None if question.is_right is None else float(question.is_right(took["text"]))
            mark = None if question.about is None else mark_of(judge, question, took["text"])
            return took | {"right": right, "mark": mark}

        sides = [Side(way.name, partial(answered, way)) for way in compared]
        for name, questions in kinds(asked, partial(_fits, compared[0]), bench).items():
            bench.compare(
                name,
                sides,
                lambda _, turn, questions=questions: questions[turn],  # type: ignore[misc]
                rounds=len(questions),
                warm_up=lambda _, questions=questions: questions[0],  # type: ignore[misc]
                metrics=METRICS,
                against=["normal", "CoD"],
            )


def kinds(asked: Asked, holds: Callable[[PDOSQuestion], bool], bench: Bench) -> dict[str, list[PDOSQuestion]]:
    """The questions asked for, by kind; what `holds` refuses loses passages, which is said. Raises OptionError."""
    numbers = range(1, asked.rounds + 1)
    found: dict[str, list[PDOSQuestion]] = {}
    if "retrieval" in asked.tasks:
        found |= {f"retrieval, {n} people": [retrieval(n, i) for i in numbers] for n in asked.people}
    if "planning" in asked.tasks:
        found |= {f"planning, {n} aspects": [planning(n, i) for i in numbers] for n in asked.aspects}
    if asked.data is not None:
        found["multi-document QA"], passages = multi_document(asked.data, asked.rounds, holds)
        cut = [f"{kept} of {there}" for kept, there in passages if kept < there]
        if cut:
            bench.show(f"passages that the model's context has room for, where not for all: {', '.join(cut)}")
    return found


def _fits(normal: Way, question: PDOSQuestion) -> bool:
    """Whether prompt and answer have room in the context; the answer twice, since prompts may hold an outline."""
    engine = normal.decoder.engine
    prompt = engine.codec.encode_prompt(normal.messages(question))
    return len(prompt) + 2 * question.tokens <= min(engine.runner.context, engine.cache.capacity)


def mark_of(judge: Decoder, question: PDOSQuestion, answer: str) -> float:
    """A model's mark from 1 to 5 (PDOS, section 4.2 and appendix C): the expected one of all five, which are scored as
    what the judge says next, so that there is always one to be read."""
    right = "" if question.reference is None else f"\n\nA right answer:\n{question.reference}"
    told = f"{_RUBRIC}\n\nThe question:\n{question.about}{right}\n\nThe answer to be marked:\n{answer}\n\n"
    prompt = Message(role="user", content=f"{told}Give only the mark."), Message(role="assistant", content="Mark:")
    choices = tuple(f" {mark}" for mark in MARKS)
    (done,) = judge.generate([Request(prompt=prompt, choices=choices, close_choices=True)])
    return expected(MARKS, [choice.total for choice in done.choice_logprobs])


def _watch(engine: Engine) -> None:
    """Begin to look for the most slots that are live."""
    engine.cache.peak_live = engine.cache.live


def _in_steps(example: Example, form: StepsFormat, drafts: bool) -> str:
    """The example's answer, in the format of steps."""
    steps = [f"{form.header(title)} {draft if drafts else whole}\n" for title, whole, draft in example.steps]
    return "".join(steps) + form.end_text + example.conclusion


def _numbered(points: Sequence[str]) -> str:
    return "\n".join(f"{number}. {point}" for number, point in enumerate(points, 1))
