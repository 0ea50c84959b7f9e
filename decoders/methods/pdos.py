"""PDOS: decode independent steps of one text in parallel.

Yu et al., 2025, section 3. Stage 1: at a marker, the model writes a skeleton of titles; the tokens that must follow a
title are fed, not drawn. Stage 2: each step continues the text before the skeleton, from its own title; all steps share
a packed forward per token. Stage 3: the steps replace the skeleton, and decoding continues after them; another skeleton
begins another block. Steps given by the request skip stage 1. The text differs from the text of `ar`, because no step
has seen the others when it is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.output import Output
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import Call, Job
from tot.decoders.errors import RequestError
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.methods.programs import Ending, Program, Sample, ending
from tot.decoders.methods.steps_format import (
    COLON,
    ELLIPSIS,
    END,
    MARKER,
    TERMINATOR,
    clean_title,
    ends_block,
    header,
    instructed,
    is_blank,
)
from tot.decoders.request import Completion, FinishReason, Part, Request, ThinkingOptions, Usage

STEP = 2**32
"""Step k of a text (from 1) draws its tokens as sample `index + k * STEP`, at positions from 0."""
_TITLE_TOKENS = 64
_MAX_STEPS = 100
_CUT = ("budget", "cancelled")
_NOTHING = Completion("", (), 0.0, "length", Usage())
_START = Ending([], "", "")
Calls = Generator[Sequence[Call], list[Completion], None]
"""A part of the program."""


class PDOSOptions(MethodOptions):
    """PDOS: write independent steps in parallel, after a skeleton of titles. The markers are a variant of the paper."""

    instructions: str | None = None
    """Instructions put before a text prompt, or after the last user message of a chat. None uses the built-in ones, ""
    adds none. A prompt of token ids is not changed."""


class _Heading(NamedTuple):
    """The beginning of a step: its title, with marker and colon as text and as tokens."""

    title: str
    text: str
    tokens: list[int]


class _SteppedText:
    """The text of one sample."""

    def __init__(self, sample: Sample, counts: Counter[str]) -> None:
        self._sample = sample
        self._counts = counts
        self._encode = sample.codec.encode
        self._stops = sample.request.sampling.stop
        self._between, self._end = self._encode("\n"), self._encode(END)
        self._fed: list[int] = []
        """The tokens after the prompt, before the last part."""
        self._left = sample.limit
        """Number of tokens that the text may have after these."""
        self._whole = Completion("", (), 0.0, "length", Usage())
        self._last = self._whole
        """The last part."""
        self._ended = False
        self._steps = 0
        """Number of steps so far."""

    def decode(self) -> Program:
        sample = self._sample
        request, sampling = sample.request, sample.request.sampling
        if headings := [self._heading(title.strip()) for title in request.steps]:
            tail = sample.codec.decode(sample.prompt[-8:])
            opening = "\n" if tail and not tail.endswith("\n") else ""
            frame = self._frame(headings) + len(self._encode(opening))
            if (needed := frame + len(headings) + 1) > self._left:
                raise RequestError(
                    f"{len(headings)} steps need at least {needed} tokens, {frame} of them for titles and markers, and "
                    f"there is room for {self._left}: raise max_tokens, shorten the prompt, or give fewer steps"
                )
            yield from self._block(headings, opening)
        watched = () if request.steps or sampling.keep_stop or MARKER in self._stops else (MARKER,)
        while not self._ended:
            thinking = ThinkingOptions(budget=0 if self._fed else sample.thinking_limit)
            stops = (*self._stops, *watched)
            (part,) = yield [self._call(max_tokens=self._left, stop=stops, thinking=thinking)]
            if watched and self._ended_by(part, MARKER) == MARKER:
                yield from self._skeleton(part)
            else:
                self._add(part, ended=True)
        if request.answer_trigger is None or self._whole.finish_reason in _CUT:
            return self._whole
        end = ending(sample.codec, self._last)
        return (yield from sample.answer(self._whole, [*self._fed, *end.tokens], end.rest))

    def _call(self, after: Sequence[int] = (), drawn: int = 0, **more: Any) -> Call:
        """Return a call that continues the text and the tokens `after` it, `drawn` of which were sampled."""
        return self._sample.call([*self._fed, *after], len(self._whole.tokens) + drawn, **more)

    def _add(self, part: Completion, ended: bool = False) -> None:
        self._whole, self._last, self._ended = self._whole.then(part), part, ended

    def _ended_by(self, part: Completion, *marks: str) -> str | None:
        """Return the stop string of the request, or the mark, that ended a part."""
        cut = ending(self._sample.codec, part).cut if part.finish_reason == "stop" else ""
        return next((stop for stop in (*self._stops, *marks) if cut.startswith(stop)), None)

    # -- stage 1: the skeleton ----------------------------------------------------------------------------------

    def _skeleton(self, lead: Completion) -> Calls:
        """Decode titles after the marker that ended the text `lead`, and then their steps.

        A malformed skeleton ends: its steps are decoded, or it is plain text if it has none.
        """
        codec = self._sample.codec
        self._counts["skeletons"] += 1
        end = ending(codec, lead)
        drawn, fed, headings = [lead], list(lead.tokens), list[_Heading]()
        valid = is_blank(end.cut.removeprefix(MARKER))
        own_prefix = len(end.tokens) + len(self._encode(end.rest))
        while True:
            if not valid or self._left <= len(fed):
                self._counts["broken"] += 1
                break
            most = min(_TITLE_TOKENS, self._left - len(fed))
            tokens = sum(len(part.tokens) for part in drawn)
            stops = (*self._stops, COLON, TERMINATOR, "\n")
            (title,) = yield [self._call(fed, tokens, streamed=None, max_tokens=most, stop=stops)]
            drawn.append(title)
            if title.finish_reason in _CUT:
                self._add(_skeleton_of(drawn, title.finish_reason), ended=True)
                return
            mark = self._ended_by(title, COLON, TERMINATOR, "\n")
            if any(stop in MARKER + title.text for stop in self._stops):
                mark = None  # the text ends in the title
            if headings and ends_block(title.text, mark):
                break
            heading = self._heading(clean_title(title.text))
            is_new = heading.title and all(heading.title != other.title for other in headings)
            valid = mark == COLON and bool(is_new) and self._share([*headings, heading], own_prefix) > 0
            if not valid:
                continue
            headings.append(heading)
            if len(headings) == _MAX_STEPS:
                break
            own = ending(codec, title, title.text + COLON)
            fed += [*own.tokens, *self._encode(f"{own.rest}{ELLIPSIS}\n{MARKER}")]
        if headings:
            yield from self._block(headings, "", _skeleton_of(drawn), end)
        else:
            yield from self._plain(drawn)

    def _plain(self, drawn: Sequence[Completion]) -> Calls:
        """Take the tokens of a skeleton as plain text, which may end in them, and decode the text to its end."""
        sampling, streamed = self._sample.request.sampling, len(drawn[0].text)
        sampled = [Sampled(*pair) for part in drawn for pair in zip(part.tokens, part.logprobs, strict=True)]
        output = Output(self._sample.codec, sampling, 0, self._left)
        if any(map(output.add, sampled)):
            part = output.completion(0.0)
            self._sample.emit(part.text[streamed:])
        else:
            policy = partial(_resumed, sampled=sampled)
            (part,) = yield [self._call(policy=policy, streamed=streamed, max_tokens=self._left)]
        usage = sum((one.usage for one in drawn), part.usage)
        self._add(replace(part, usage=usage), ended=True)

    # -- stage 2: the steps -------------------------------------------------------------------------------------

    def _heading(self, title: str) -> _Heading:
        return _Heading(title, header(title), self._encode(header(title)))

    def _frame(self, headings: Sequence[_Heading]) -> int:
        """Return the number of tokens of a block that are fed: titles and markers."""
        return sum(len(heading.tokens) + len(self._between) for heading in headings) + len(self._end)

    def _share(self, headings: Sequence[_Heading], prefix: int) -> int:
        """Return the tokens of each step and of the text after them: equal shares of what `prefix` tokens leave."""
        return (self._left - prefix - self._frame(headings)) // (len(headings) + 1)

    def _block(
        self, headings: Sequence[_Heading], opening: str, skeleton: Completion = _NOTHING, end: Ending = _START
    ) -> Calls:
        """Decode the steps after the text of `skeleton`, which ends as `end` says, and `opening`."""
        sample = self._sample
        sample.emit(opening)
        prefix, room = self._encode(end.rest + opening), self._left - len(end.tokens)
        limit = self._share(headings, len(end.tokens) + len(prefix))
        before, own = [*self._fed, *end.tokens, *prefix], sample.request.sampling
        options: dict[str, Any] = {"streamed": None, "max_tokens": limit, "stop": (*self._stops, MARKER, TERMINATOR)}
        steps = yield [
            sample.call([*before, *heading.tokens], 0, sample=own.sample + sample.index + number * STEP, **options)
            for number, heading in enumerate(headings, self._steps + 1)
        ]
        self._steps += len(steps)
        stopped = next((i for i, one in enumerate(steps, 1) if self._ended_by(one, MARKER) in self._stops), None)
        steps = steps[:stopped]  # the text ends there
        cut = next((step.finish_reason for step in steps if step.finish_reason in _CUT), None)
        fed, parts = list(prefix), list[Part]()
        for heading, step in zip(headings, steps, strict=False):
            last = stopped is not None and step is steps[-1]
            body = step.text if last or cut else step.text.rstrip().rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
            part = ending(sample.codec, step, body)
            tokens = [*part.tokens, *self._encode(part.rest)]
            if len(tokens) > limit:  # encoding a token cut by a marker took more tokens
                tokens = tokens[:limit]
                body = sample.codec.decode(tokens)
            fed += [*heading.tokens, *tokens, *([] if last else self._between)]
            if step.tokens or not cut:
                parts.append(Part("step", f"{heading.text}{body}{'' if last else chr(10)}", len(step.tokens)))
        if stopped or cut:
            parts.append(Part("exact", ""))
        else:
            parts.append(Part("exact", END))
            fed += self._end
        self._fed, self._left = [*self._fed, *end.tokens, *fed], room - len(fed)
        text = "".join(part.text for part in parts)
        sample.emit(text)
        *thinking, lead = skeleton.parts or (Part("exact", ""),)
        first = [*thinking, *([replace(lead, text=lead.text + opening)] if lead.text + opening else [])]
        self._whole = self._whole.then(replace(skeleton, text=skeleton.text + opening, parts=tuple(first)))
        usage = sum((step.usage for step in steps), Usage())
        self._add(
            Completion(
                text=text,
                tokens=tuple(token for step in steps for token in step.tokens),
                logprob=sum(step.logprob for step in steps),
                finish_reason=cut or "stop",
                usage=replace(usage, forwards=max(step.usage.forwards for step in steps)),
                parts=tuple(parts),
                logprobs=tuple(logprob for step in steps for logprob in step.logprobs),
            ),
            ended=bool(stopped or cut),
        )
        self._last = _NOTHING


def _skeleton_of(drawn: Sequence[Completion], reason: FinishReason = "stop") -> Completion:
    """Return a text with the tokens of the skeleton that followed it, without the skeleton's text."""
    lead, *titles = drawn
    *thinking, text = lead.parts
    whole = lead
    for title in titles:
        whole = whole.then(title)
    count = len(whole.tokens) - sum(part.tokens for part in thinking)
    return replace(whole, text=lead.text, parts=(*thinking, replace(text, tokens=count)), finish_reason=reason)


def _resumed(job: Job, sampled: Sequence[Sampled]) -> Autoregressive:
    """Continue a text whose first tokens were sampled before."""
    for one in sampled:
        job.outputs[0].add(one)
    return Autoregressive(job)


def _open(engine: Engine, options: PDOSOptions, stack: ExitStack) -> OpenedMethod:
    def prepare(request: Request) -> Request:
        prompt = instructed(request.prompt, bool(request.steps), options.instructions)
        return request.model_copy(update={"prompt": prompt})

    counts = Counter[str]()

    def program(sample: Sample) -> Program:
        return _SteppedText(sample, counts).decode()

    return OpenedMethod(Autoregressive, prepare=prepare, program=program, writes_steps=True, counts=counts)


METHOD = Method(_open, PDOSOptions, few_shot=True)
