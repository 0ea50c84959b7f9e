"""The benchmark `pdos`: parallel steps against normal decoding, in the shape of PDOS's Table 1 (Yu et al., 2025).

The ways compared are normal decoding and PDOS on the same prompt; both on a prompt that asks for drafts (CoD:
chain-of-draft, Xu et al., 2025); and an outline whose points are one batch (SoT: skeleton-of-thought, Ning et al.,
2024). Prompts explain the step format with our skeleton prompt (in the form of PDOS, appendix A), a worked example or
both.

Seconds are the total time at temperature 0, from an empty cache: the prefill of the prompt (one new token), then the
answer from a cache with only the prompt. The rate of new tokens is of the second part, as the paper's. Tokens are
counted in the finished text, without skeletons; "said" also leaves out titles and markers. Slots are the peak number of
key-value slots relative to normal decoding of the same text.
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
from rich.table import Table

from benchmarks.engines import about, forget
from benchmarks.harness import Bench, Measured, Measurements, Metric, Side, percent, plain, timed, times
from benchmarks.options import PDOSBench
from benchmarks.papers.pdos_questions import (
    PDOSQuestion,
    documents,
    listed,
    multi_document,
    planning,
    retrieval,
)
from tot.decoders.decoder import Decoder, LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.request import Message, Request, Sampling
from tot.evaluation.estimate import bootstrap, paired
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
_DECODING = Metric("decoding", lambda measured: measured["decoding"], plain(".1f"), less=True)
METRICS = [
    Metric("total seconds", lambda measured: measured["seconds"], plain(".1f"), less=True),
    Metric("prefill", lambda measured: measured["prefill"], plain(".1f")),
    _DECODING,
    Metric("new tokens/s", lambda measured: measured["tokens"] / measured["decoding"], plain(".1f")),
    Metric("said, tokens/s", lambda measured: measured["said"] / measured["decoding"], plain(".1f")),
    Metric("right", lambda measured: measured["right"], percent),
    Metric("steps right", lambda measured: measured["right steps"], percent),
    Metric("mark", lambda measured: measured["mark"], lambda values: f"{fmean(values):.2f}"),
    Metric("slots", lambda measured: measured["slots"], plain(".3f")),
    Metric("format kept", lambda measured: measured["kept_format"], percent),
]
_QUALITY = {"right": (paired, "+.0%"), "steps right": (paired, "+.0%"), "mark": (bootstrap, "+.2f")}
"""The interval of a metric's differences, and their format."""
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Way:
    """A way to answer: a decoder, whether steps are drafts, and whether the steps' titles are given."""

    name: str
    decoder: LocalDecoder
    drafts: bool = False
    given: bool = False
    outline: bool = False
    """Skeleton-of-thought: an outline, then all of its points as one batch, joined in order. The prompts of the points
    contain the outline; their prefill is part of the decoding."""
    prompt: str = "both"
    """How the prompt explains the step format; see `PDOSBench.prompt`."""

    @property
    def form(self) -> StepsFormat:
        return StepsFormat(PDOSOptions(), self.decoder.engine.codec)

    def messages(self, question: PDOSQuestion) -> Messages:
        """Return the prompt: the step format and the question."""
        example, form, words = question.example, self.form, _DRAFTS if self.drafts else ""
        answer = example.in_steps(form, self.drafts)
        with_example, with_instructions = self.prompt in ("example", "both"), self.prompt in ("skeleton", "both")
        if self.outline:
            answer = _numbered([*(title for title, _, _ in example.steps), example.last])
            with_example, with_instructions, words = True, False, _OUTLINE
        turns = [
            Message(role="user", content=f"{words}\n\n{text}".strip())
            for text in ([example.text, question.text] if with_example else [question.text])
        ]
        if with_instructions:
            turns[0] = Message(role="user", content=f"{form.instructions()}\n\n{turns[0].content}")
        return (turns[0], Message(role="assistant", content=answer), *turns[1:]) if with_example else tuple(turns)

    def ask(self, question: PDOSQuestion) -> Measured:
        """Answer a question with an empty cache."""
        messages, engine = self.messages(question), self.decoder.engine
        forget(self.decoder)
        first = Request(prompt=messages, sampling=Sampling(max_tokens=1))
        prefill, _ = timed(lambda: self.decoder.generate([first]))
        engine.call(engine.accounts.clear)
        engine.call(partial(_watch, engine))
        decoding, (text, prompt, steps) = timed(lambda: self._decode(question, messages))
        tokens = len(engine.codec.encode(text))
        account = engine.call(lambda: engine.accounts["generate"])
        format_kept = steps > 1 and account.skeletons > account.broken == 0
        return {
            "seconds": prefill + decoding,
            "prefill": prefill,
            "decoding": decoding,
            "tokens": tokens,
            "said": len(engine.codec.encode(said(text, self.form))),
            "text": text,
            "slots": engine.cache.peak_live / (prompt + tokens - 1),  # the last token needs no slot
            "steps": steps,
            "kept_format": float(format_kept) if self.decoder.name == "pdos" and not self.given else None,
        }

    def _decode(self, question: PDOSQuestion, messages: Messages) -> tuple[str, int, float]:
        """Return the text, the prompt length in tokens and the mean number of steps per block."""
        sampling = Sampling(max_tokens=question.tokens)
        titles = question.titles if self.given else ()
        (completion,) = self.decoder.generate([Request(prompt=messages, sampling=sampling, steps=titles)])
        text, prompt = completion.text, completion.usage.prompt_tokens
        if not self.outline:
            blocks = [
                len(list(parts)) for kind, parts in groupby(part.kind for part in completion.parts) if kind == "step"
            ]
            return text, prompt, fmean(blocks) if blocks else 0.0
        points = listed(text)[: question.tokens // question.step_tokens]
        if points:  # without points, the text itself is the answer
            text = "\n".join(self._write(question, points))
        return text, prompt, 0.0

    def _write(self, question: PDOSQuestion, points: Sequence[str]) -> list[str]:
        """Write out every point of an outline."""
        sampling, outline = Sampling(max_tokens=question.step_tokens), _numbered(points)
        heads = [f"{number}. {point}:" for number, point in enumerate(points, 1)]
        texts = [f"{question.text}\n\n{_POINT.format(outline=outline, number=i)}" for i in range(1, len(points) + 1)]
        prompts = [
            (Message(role="user", content=text), Message(role="assistant", content=head))
            for text, head in zip(texts, heads, strict=True)
        ]
        completions = self.decoder.generate([Request(prompt=prompt, sampling=sampling) for prompt in prompts])
        return [f"{head} {one.text.strip()}" for head, one in zip(heads, completions, strict=True)]


def said(text: str, form: StepsFormat) -> str:
    """Remove titles, numbers and markers from a text."""
    marker, colon = re.escape(form.options.marker), re.escape(form.options.colon)
    title = rf"(?:{marker}|\d{{1,3}}\.)[^\n]*?{colon}|{re.escape(form.end_text.strip())}"
    return re.sub(rf"^[ \t]*(?:{title})[ \t]*", "", text, flags=re.MULTILINE)


def ways(normal: LocalDecoder, steps: LocalDecoder, prompt: str = "both") -> list[Way]:
    """Return the rows of Table 1 for the decoders `ar` and `pdos` of one engine.

    `pdos` runs with given titles and with its own skeletons. It must not add instructions, since the prompts already
    explain the step format.
    """
    rows = [
        Way("normal", normal),
        Way("pdos, given", steps, given=True),
        Way("pdos, own", steps),
        Way("SoT", normal, outline=True),
        Way("CoD", normal, drafts=True),
        Way("CoD + pdos, given", steps, drafts=True, given=True),
        Way("CoD + pdos, own", steps, drafts=True),
    ]
    return [replace(way, prompt=prompt) for way in rows]


def run(asked: PDOSBench, console: Console) -> None:
    """Run the benchmark and print a table for each kind of question."""
    with ExitStack() as stack:
        normal = stack.enter_context(load_decoder("ar", asked.model, **asked.computed))
        steps = stack.enter_context(load_decoder("pdos", engine=normal.engine, instructions=""))
        judge = normal
        if asked.judge is not None:
            judge = stack.enter_context(load_decoder("ar", asked.judge, **asked.computed))
        bench = Bench(asked, console, f"{asked.model}; {about(normal.engine)}")
        compared = ways(normal, steps, asked.prompt)

        def answered(way: Way, question: PDOSQuestion) -> Measured:
            """Answer a question and add the correctness and mark of the answer, which are not timed."""
            measured = way.ask(question)
            right = None if question.is_right is None else float(question.is_right(measured["text"]))
            steps = None if question.right_steps is None else question.right_steps(measured["text"])
            mark = None if question.about is None else mark_of(judge, question, measured["text"])
            return measured | {"right": right, "right steps": steps, "mark": mark}

        sides = [Side(way.name, partial(answered, way)) for way in compared]
        own = [replace(one, heading="its own mark") if one.heading == "mark" else one for one in METRICS]
        for way in compared[:3]:  # warm up
            way.ask(planning(2, 0))
        for name, questions in kinds(asked, partial(_fits, compared[0]), bench).items():
            results = bench.compare(
                name,
                sides,
                lambda _, turn, questions=questions: questions[turn],  # type: ignore[misc]
                rounds=len(questions),
                metrics=own if asked.judge is None else METRICS,
                against=["normal", "CoD"],
            )
            bench.show(_differences(name, results))


def _differences(title: str, results: Measurements) -> Table:
    """Build a table of the speed of decoding alone and of the quality, both paired with normal decoding."""
    quality = [one for one in METRICS if one.heading in _QUALITY and results.values(one, "normal")]
    headings = ["decoding alone", *(f"{one.heading}, minus normal (95% interval)" for one in quality)]
    table = Table("", *headings, title=f"{title}, against normal")

    def difference(metric: Metric, side: str) -> str:
        interval, form = _QUALITY[metric.heading]
        pairs = zip(results.values(metric, side), results.values(metric, "normal"), strict=False)
        return interval([a - b for a, b in pairs]).format(form)

    for side in results.sides[1:]:
        speed = times(results.ratios(_DECODING, side, "normal"))
        table.add_row(side, speed, *(difference(metric, side) for metric in quality))
    return table


def kinds(asked: PDOSBench, holds: Callable[[PDOSQuestion], bool], bench: Bench) -> dict[str, list[PDOSQuestion]]:
    """Return the questions by kind. Raises OptionError for an unusable file.

    Questions that `holds` rejects lose passages, which is reported.
    """
    numbers = range(1, asked.rounds + 1)
    questions: dict[str, list[PDOSQuestion]] = {}
    if "retrieval" in asked.tasks:
        questions |= {f"retrieval, {n} people": [retrieval(n, i) for i in numbers] for n in asked.people}
    if "planning" in asked.tasks:
        questions |= {f"planning, {n} aspects": [planning(n, i) for i in numbers] for n in asked.aspects}
    if "qa" in asked.tasks and asked.data is None:
        questions |= {f"multi-document QA, {n} passages": [documents(n, i) for i in numbers] for n in asked.passages}
    elif asked.data is not None:
        questions["multi-document QA"], passages = multi_document(asked.data, asked.rounds, holds)
        cut = [f"{retained} of {total}" for retained, total in passages if retained < total]
        if cut:
            bench.show(f"passages that fit into the model's context, for questions that lost some: {', '.join(cut)}")
    return questions


def _fits(normal: Way, question: PDOSQuestion) -> bool:
    """Whether the prompt and twice the answer fit into the context; prompts may contain an outline."""
    engine = normal.decoder.engine
    prompt = engine.codec.encode_prompt(normal.messages(question))
    return len(prompt) + 2 * question.tokens <= min(engine.runner.context, engine.cache.capacity)


def mark_of(judge: Decoder, question: PDOSQuestion, answer: str) -> float:
    """Return a model's mark from 1 to 5, with our rubric in the form of PDOS, appendix C.

    It is the expected value over all five marks, scored as the judge's next tokens, so a mark always exists.
    """
    right = "" if question.reference is None else f"\n\nA right answer:\n{question.reference}"
    request = f"{_RUBRIC}\n\nThe question:\n{question.about}{right}\n\nThe answer to be marked:\n{answer}\n\n"
    prompt = Message(role="user", content=f"{request}Give only the mark."), Message(role="assistant", content="Mark:")
    choices = tuple(f" {mark}" for mark in MARKS)
    (done,) = judge.generate([Request(prompt=prompt, choices=choices, close_choices=True)])
    return expected(MARKS, [choice.total for choice in done.choice_logprobs])


def _watch(engine: Engine) -> None:
    """Reset the peak number of live slots."""
    engine.cache.peak_live = engine.cache.live


def _numbered(points: Sequence[str]) -> str:
    return "\n".join(f"{number}. {point}" for number, point in enumerate(points, 1))
