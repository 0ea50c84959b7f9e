"""The benchmark `pdos`: parallel steps against normal decoding, in the shape of PDOS's Table 1 (Yu et al., 2025).

The ways compared are normal decoding and PDOS on the same prompt; both on a prompt that asks for drafts (CoD:
chain-of-draft, Xu et al., 2025); and an outline whose points are one batch (SoT: skeleton-of-thought, Ning et al.,
2024). Prompts explain the step format with our skeleton prompt (in the form of PDOS, appendix A) and a worked example.

Seconds are the total time at temperature 0, from an empty cache: the prefill of the prompt (one new token), then the
answer from a cache with only the prompt. The rate of new tokens is of the second part, as the paper's. Tokens are
counted in the finished text, without skeletons. Slots are the peak number of key-value slots relative to normal
decoding of the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import about, forget
from benchmarks.harness import Bench, BenchOptions, Cells, Measured, Metric, by_metric, percent, plain, timed, times
from benchmarks.pdos_questions import PDOSQuestion, documents, listed, planning, retrieval
from tot.decoders.decoder import Decoder, LocalDecoder, load_decoder
from tot.decoders.errors import OptionError
from tot.decoders.methods.steps_format import instructed
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
_DECODING = Metric("decoding", lambda cell: cell["decoding"], plain(".1f"), less=True)
METRICS = [
    Metric("total seconds", lambda cell: cell["seconds"], plain(".1f"), less=True),
    Metric("prefill", lambda cell: cell["prefill"], plain(".1f")),
    _DECODING,
    Metric("new tokens/s", lambda cell: cell["tokens"] / cell["decoding"], plain(".1f")),
    Metric("right", lambda cell: cell["right"], percent),
    Metric("steps right", lambda cell: cell["right steps"], percent),
    Metric("mark", lambda cell: cell["mark"], lambda values: f"{fmean(values):.2f}"),
    Metric("slots", lambda cell: cell["slots"], plain(".3f")),
    Metric("format kept", lambda cell: cell["kept_format"], percent),
]
_QUALITY = {"right": (paired, "+.0%"), "steps right": (paired, "+.0%"), "mark": (bootstrap, "+.2f")}
"""The interval of a metric's differences, and their format."""


_KINDS = {"retrieval": (retrieval, 4, 100), "planning": (planning, 2, 10), "qa": (documents, 4, 100)}
"""For each kind of questions, the function that makes one, and the bounds of its size."""


class Options(BenchOptions):
    """Compare parallel steps with normal decoding, skeleton-of-thought and chain-of-draft: quality, speed, memory."""

    extends: ClassVar = "rounds"
    prompt: Literal["both", "none"] = Field(
        "both",
        description="Whether the prompt explains the step format, by our skeleton prompt and a worked example: none is "
        "for a model that was trained on it.",
    )
    questions: tuple[str, ...] = Field(
        ("retrieval=10", "planning=2", "planning=4", "planning=6", "planning=8", "planning=10", "qa=8"),
        description="Comma-separated kinds of questions with their sizes: retrieval=PEOPLE (4 to 100), "
        "planning=ASPECTS (2 to 10), qa=PASSAGES (4 to 100).",
    )
    judge: str | None = Field(
        None, description="Model that marks plans and answers from 1 to 5; by default the tested model."
    )
    rounds: int = Field(3, ge=1, description="Questions of each kind. The sides take turns at each question.")


@dataclass(frozen=True)
class Way:
    """A way to answer: a decoder, whether steps are drafts, and whether the steps' titles are given."""

    decoder: LocalDecoder
    drafts: bool = False
    given: bool = False
    outline: bool = False
    """Skeleton-of-thought: an outline, then all of its points as one batch, joined in order. The prompts of the points
    contain the outline; their prefill is part of the decoding."""
    explains: bool = True
    """Whether the prompt explains the step format."""

    def messages(self, question: PDOSQuestion) -> tuple[Message, ...]:
        """Return the prompt: the step format and the question. An outline always gets an example."""
        example, words = question.example, _OUTLINE if self.outline else _DRAFTS if self.drafts else ""
        first, last = (f"{words}\n\n{text}".strip() for text in (example.text, question.text))
        if not (self.explains or self.outline):
            return (Message(role="user", content=last),)
        points = [*(title for title, _, _ in example.steps), example.last]
        answer = _numbered(points) if self.outline else example.in_steps(self.drafts)
        return (
            Message(role="user", content=first if self.outline else instructed(first, given=False)),
            Message(role="assistant", content=answer),
            Message(role="user", content=last),
        )

    def ask(self, question: PDOSQuestion) -> Measured:
        """Answer a question with an empty cache."""
        messages, engine = self.messages(question), self.decoder.engine
        forget(self.decoder)
        first = Request(prompt=messages, sampling=Sampling(max_tokens=1))
        prefill, _ = timed(lambda: self.decoder.generate([first]))
        counts = self.decoder.method.counts or Counter()
        counts.clear()
        engine.call(lambda: setattr(engine.cache, "peak_live", engine.cache.live))
        decoding, (text, prompt, steps) = timed(lambda: self._decode(question, messages))
        tokens = len(engine.codec.encode(text))
        format_kept = steps > 1 and counts["skeletons"] > counts["broken"] == 0
        return {
            "seconds": prefill + decoding,
            "prefill": prefill,
            "decoding": decoding,
            "tokens": tokens,
            "text": text,
            "slots": engine.cache.peak_live / (prompt + tokens - 1),  # the last token needs no slot
            "steps": steps,
            "kept_format": float(format_kept) if self.decoder.name == "pdos" and not self.given else None,
        }

    def _decode(self, question: PDOSQuestion, messages: tuple[Message, ...]) -> tuple[str, int, float]:
        """Return the text, the prompt length in tokens and the mean number of steps per block."""
        sampling = Sampling(max_tokens=question.tokens)
        titles = question.titles if self.given else ()
        (completion,) = self.decoder.generate([Request(prompt=messages, sampling=sampling, steps=titles)])
        text, prompt = completion.text, completion.usage.prompt_tokens
        if not self.outline:
            kinds = groupby(part.kind for part in completion.parts)
            blocks = [len(list(parts)) for kind, parts in kinds if kind == "step"]
            return text, prompt, fmean(blocks) if blocks else 0.0
        points = listed(text)[: question.tokens // question.step_tokens]
        if points:  # without points, the text itself is the answer
            text = "\n".join(self._write(question, points))
        return text, prompt, 0.0

    def _write(self, question: PDOSQuestion, points: Sequence[str]) -> list[str]:
        """Write out every point of an outline."""
        sampling, outline = Sampling(max_tokens=question.step_tokens), _numbered(points)
        heads, asked = [f"{number}. {point}:" for number, point in enumerate(points, 1)], []
        for number, head in enumerate(heads, 1):
            text = f"{question.text}\n\n{_POINT.format(outline=outline, number=number)}"
            prompt = Message(role="user", content=text), Message(role="assistant", content=head)
            asked.append(Request(prompt=prompt, sampling=sampling))
        completions = self.decoder.generate(asked)
        return [f"{head} {one.text.strip()}" for head, one in zip(heads, completions, strict=True)]


def _numbered(points: Sequence[str]) -> str:
    return "\n".join(f"{number}. {point}" for number, point in enumerate(points, 1))


def ways(normal: LocalDecoder, steps: LocalDecoder, explains: bool = True) -> dict[str, Way]:
    """Return the rows of Table 1 for the decoders `ar` and `pdos` of one engine.

    `pdos` runs with given titles and with its own skeletons. It must not add instructions, since the prompts already
    explain the step format.
    """
    return {
        "normal": Way(normal, explains=explains),
        "pdos, given": Way(steps, given=True, explains=explains),
        "pdos, own": Way(steps, explains=explains),
        "SoT": Way(normal, outline=True),
        "CoD": Way(normal, drafts=True, explains=explains),
        "CoD + pdos, given": Way(steps, drafts=True, given=True, explains=explains),
        "CoD + pdos, own": Way(steps, drafts=True, explains=explains),
    }


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print a table for each kind of question."""
    every = kinds(asked)
    with ExitStack() as stack:
        normal = stack.enter_context(load_decoder("ar", asked.model, prefix_cache=False))
        steps = stack.enter_context(load_decoder("pdos", engine=normal.engine, instructions=""))
        judge, metrics = normal, METRICS
        if asked.judge is None:
            metrics = [replace(one, heading="its own mark") if one.heading == "mark" else one for one in METRICS]
        else:
            judge = stack.enter_context(load_decoder("ar", asked.judge, prefix_cache=False))
        bench = Bench(asked, console, f"{asked.model}; {about(normal.engine)}")
        compared = ways(normal, steps, asked.prompt == "both")

        def answered(way: Way, question: PDOSQuestion) -> Measured:
            """Answer a question and add the correctness and mark of the answer, which are not timed."""
            measured = way.ask(question)
            text = measured["text"]
            right, right_steps = question.right(text), question.right_steps(text)
            mark = mark_of(judge, question, text) if right is None else None
            return measured | {"right": right, "right steps": right_steps, "mark": mark}

        for name in ("normal", "pdos, given", "pdos, own"):  # warm up
            compared[name].ask(planning(2, 0))
        for title, questions in every.items():
            cells = bench.compare(
                title,
                {name: partial(answered, way) for name, way in compared.items()},
                questions,
                partial(by_metric, metrics=metrics, against=["normal", "CoD"], title=title),
            )
            bench.show(_differences(title, cells))


def kinds(asked: Options) -> dict[str, list[PDOSQuestion]]:
    """Return the questions by kind. Raises OptionError for an unknown kind or size."""
    found = {}
    for text in asked.questions:
        name, _, size = text.partition("=")
        make, low, high = _KINDS.get(name, (retrieval, 1, 0))
        if not (size.isdecimal() and low <= int(size) <= high):
            raise OptionError(
                f"--questions {text!r} can't be read: write retrieval=4 to 100, planning=2 to 10 or qa=4 to 100"
            )
        found[text] = [make(int(size), seed) for seed in range(1, asked.rounds + 1)]
    return found


def _differences(title: str, cells: Cells) -> Table:
    """Build a table of the speed of decoding alone and of the quality, both paired with normal decoding."""
    quality = [one for one in METRICS if one.heading in _QUALITY and cells.values(one, "normal")]
    headings = ["decoding alone", *(f"{one.heading}, minus normal (95% interval)" for one in quality)]
    table = Table("", *headings, title=f"{title}, against normal")
    for side in cells.sides[1:]:
        differences = []
        for metric in quality:
            interval, form = _QUALITY[metric.heading]
            pairs = zip(cells.values(metric, side), cells.values(metric, "normal"), strict=False)
            differences.append(interval([a - b for a, b in pairs]).format(form))
        table.add_row(side, times(cells.ratios(_DECODING, side, "normal")), *differences)
    return table


def mark_of(judge: Decoder, question: PDOSQuestion, answer: str) -> float:
    """Return a model's mark of a plan from 1 to 5, with our rubric in the form of PDOS, appendix C.

    It is the expected value over all five marks, scored as the judge's next tokens, so a mark always exists.
    """
    request = f"{_RUBRIC}\n\nThe question:\n{question.text}\n\nThe answer to be marked:\n{answer}\n\n"
    prompt = Message(role="user", content=f"{request}Give only the mark."), Message(role="assistant", content="Mark:")
    choices = tuple(f" {mark}" for mark in MARKS)
    (done,) = judge.generate([Request(prompt=prompt, choices=choices, close_choices=True)])
    return expected(MARKS, [choice.total for choice in done.choice_logprobs])
