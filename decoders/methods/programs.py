"""Request programs: a sample that is decoded as several requests, which share its prefix in the cache.

A program is a generator. It yields calls, which the engine packs with all other requests, and gets their completions.
It returns the sample's completion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tot.decoders.budget import Meter
from tot.decoders.constraint import Constraint
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sequence import Call, Handle, PolicyFactory
from tot.decoders.engine.text import Encoded, TextCodec
from tot.decoders.errors import ModelError, TotError, describe
from tot.decoders.methods.choices import ScoreChoices
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.request import Completion, Part, Request, ThinkingOptions
from tot.decoders.thinking import find_thinking, forced_end, joined

_COUNTED = ThinkingOptions(budget=2**31, counted=True)
Program = Generator[Sequence[Call], list[Completion], Completion]


class ProgramHandle(Handle):
    """A request whose samples are decoded by programs. `calls` are the first ones, to submit."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        method: OpenedMethod,
        program: Callable[[Sample], Program],
        meter: Meter | None,
        stream: bool,
    ) -> None:
        """Raises RequestError if the request can never run."""
        super().__init__(engine.wake, stream)
        self.request = request if method.prepare is None else method.prepare(request)
        self.engine = engine
        self.meter = meter or Meter()
        self.policy = method.policy
        options = engine.codec.options_of(self.request)
        self.prompt = engine.codec.encode_prompt(self.request.prompt, options)
        self.awaits = engine.codec.awaits(self.request.prompt, options)
        self.limits = engine.limits(self.request, self.prompt)
        growth = self.limits.text + engine.codec.after_rationale(self.request) + method.draft_rows
        engine.check_slots(self.request, len(self.prompt), growth)
        if self.request.constraint is not None:  # compile it here, not in the engine's thread
            engine.grammars.matcher(self.request.constraint)
        self._started = time.monotonic()
        self._samples = [Sample(self, index) for index in range(request.sampling.n)]
        self.calls = [call for sample in self._samples for call in sample.begin(program(sample))]

    def deliver(self) -> None:
        """Settle the request once all samples are complete. The first one counts the prompt."""
        completions = []
        for sample in self._samples:
            if sample.completion is None:
                return
            usage = replace(
                sample.completion.usage,
                prompt_tokens=0 if sample.index else len(self.prompt),
                reused_prompt_tokens=0 if sample.index else min(sample.reused or 0, len(self.prompt)),
                new_tokens=len(sample.completion.tokens) + sample.tried,
                seconds=time.monotonic() - self._started,
            )
            completions.append(replace(sample.completion, usage=usage))
        self.finish(completions)

    def finish(self, result: list[Completion] | BaseException) -> None:
        """Settle the request. An error cancels the calls that still run."""
        if self.future.done():
            return
        if isinstance(result, BaseException) and not isinstance(result, TotError):
            result = ModelError(f"decoding failed: {describe(result)}")
        super().finish(result)
        if isinstance(result, BaseException):
            self.cancel()


class Sample:
    """A sample of a request, for its program. After the first calls, the program runs in the engine's thread."""

    def __init__(self, handle: ProgramHandle, index: int) -> None:
        self.index = index
        self.request, self.prompt, self.codec = handle.request, handle.prompt, handle.engine.codec
        self.awaits = handle.awaits
        """See `TextCodec.awaits`."""
        self.limit, self.thinking_limit, self.total = handle.limits
        """Maximum number of tokens of its text before an answer trigger, of its thinking, and of both."""
        self.completion: Completion | None = None
        self.reused: int | None = None
        """Number of prompt tokens that were cached for the first call."""
        self.tried = 0
        """Number of tokens that were decoded for tries of its answer."""
        self.handle = handle
        self._program: Program
        self._calls: Sequence[Call] = ()
        self._results: dict[Handle, Completion] = {}

    def begin(self, program: Program) -> Sequence[Call]:
        """Return the first calls of its program."""
        self._program, self._calls = program, next(program)
        return self._calls

    def receive(self, call: Handle, result: list[Completion] | BaseException) -> None:
        """Take the result of a call. After the last one, continue the program."""
        if isinstance(result, BaseException):
            self.handle.finish(result)
            return
        (completion,) = result
        if self.reused is None:
            self.reused = completion.usage.reused_prompt_tokens
        usage = replace(completion.usage, prompt_tokens=0, reused_prompt_tokens=0)
        self._results[call] = replace(completion, usage=usage)
        if len(self._results) < len(self._calls):
            return
        results, self._results = [self._results[call.handle] for call in self._calls], {}
        try:
            self._calls = self._program.send(results)
            self.handle.engine.submit(self._calls, self.handle.meter)
        except StopIteration as end:
            self.completion = end.value
            self.handle.deliver()
        except Exception as error:  # the caller of the request handles it  # noqa: BLE001
            self.handle.finish(error)

    def emit(self, text: str) -> None:
        """Stream a text that no call decoded."""
        self.handle.put(self.index, text)

    def call(
        self,
        after: Sequence[int],
        drawn: int,
        policy: PolicyFactory | None = None,
        streamed: int | None = 0,
        awaits: str | None = "",
        constraint: Constraint | None = None,
        **sampling: Any,
    ) -> Call:
        """Return a call that continues the prompt and the tokens `after` it, `drawn` of which were sampled.

        `streamed`: number of first characters of its text that were streamed before; None streams nothing.
        `awaits` is as in `Encoded`; a call without `after` begins as the prompt ends.
        """
        own = self.request.sampling
        place = {
            "n": 1,
            "sample": own.sample + self.index,
            "drawn": own.drawn + drawn,
            "thinking": _COUNTED,
        }
        prompt = Encoded((*self.prompt, *after))
        prompt.awaits = awaits if after else self.awaits
        changes = {"prompt": prompt, "sampling": own.model_copy(update={**place, **sampling})}
        changes |= {"answer_trigger": None, "choices": (), "close_choices": False, "steps": ()}
        changes |= {"constraint": constraint}
        handle = _CallHandle(self, streamed)
        return Call(self.request.model_copy(update=changes), policy or self.handle.policy, handle)

    def rationale(self, policy: PolicyFactory | None = None) -> Call:
        """Return the call for the text up to its end."""
        most = min(self.limit, self.request.sampling.max_tokens)
        counted = self.request.sampling.thinking.counted
        thinking = ThinkingOptions(budget=self.thinking_limit, counted=counted)
        return self.call((), 0, policy, max_tokens=most, thinking=thinking)

    def answer(self, rationale: Completion, after: Sequence[int], rest: str = "") -> Program:
        """Append the trigger to a rationale, and the answer or the scores of the choices.

        `after` are the rationale's tokens to feed, and `rest` is the end of its text that they lack.
        """
        request, trigger = self.request, self.request.answer_trigger
        assert trigger is not None
        self.emit(trigger)
        begun = replace(rationale, text=rationale.text + trigger, parts=(*rationale.parts, Part("trigger", trigger)))
        ids = [*after, *self.codec.encode(rest + trigger)]
        limit = request.answer_tokens
        call = self.call(ids, len(rationale.tokens), constraint=request.constraint, max_tokens=limit)
        if request.choices:
            call = call._replace(policy=partial(ScoreChoices, choices=self.codec.encode_choices(request)))
        (answer,) = yield [call]
        return replace(begun.then(answer), trajectory=rationale.trajectory)


def answered(sample: Sample, text: Completion) -> Program:
    """Return a text that has an answer: one that was cut in its thinking continues after the end of the thinking."""
    if text.finish_reason in ("budget", "cancelled") or not text.lacks_answer:
        return text
    codec = sample.codec
    tokens = tuple(token for token in text.tokens if token not in codec.end_ids)
    written = codec.decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}")  # of an unfinished character
    forced = forced_end(written, sample.awaits or "")
    if forced is None and text.finish_reason != "length":  # the model closed its thinking, and ended its text
        return text
    kept, end = forced or (written, "")
    parts = [part for part in text.parts if part.kind == "thinking"]
    thinking = replace(parts[-1], text=find_thinking(kept, sample.awaits or "").text, tokens=len(text.tokens))
    return (yield from closed(sample, replace(text, parts=(thinking,)), codec.beginning(tokens, kept), end))


def closed(sample: Sample, text: Completion, tokens: Sequence[int], end: str, hint: str | None = None) -> Program:
    """Append the end of its thinking to a text, of which `tokens` are fed, and decode the answer.

    An empty `end` continues an answer whose thinking the model has closed. `hint` begins the answer; by default it is
    the request's.
    """
    codec, sampling = sample.codec, sample.request.sampling
    if hint is None:
        hint = sampling.thinking.hint if end and not sample.request.constraint else ""
    after = [*tokens, *(codec.encode_control(end) if end else []), *(codec.encode(hint) if hint else [])]
    used = len(text.tokens)
    most = max(1, sample.total - used) if sampling.thinking.counted else sample.limit
    sample.emit(hint)
    constraint = sample.request.constraint if sample.request.answer_trigger is None else None
    (answer,) = yield [sample.call(after, used, awaits=None, constraint=constraint, max_tokens=most)]
    return joined(text, end, hint, answer, exact=constraint is not None, pieces=sampling.keep_stop)


def rationale_then_answer(sample: Sample) -> Program:
    """Decode a rationale to its end, and then the answer."""
    (rationale,) = yield [sample.rationale()]
    rationale = yield from answered(sample, rationale)
    if rationale.finish_reason in ("budget", "cancelled"):
        return rationale
    end = ending(sample.codec, rationale)
    return (yield from sample.answer(rationale, end.tokens, end.rest))


class Ending(NamedTuple):
    """The end of a text in its tokens."""

    tokens: list[int]
    """The whole tokens of the text."""
    rest: str
    """The end of the text, which begins inside the next token."""
    cut: str
    """The decoded text after the end: a stop string, and the rest of its last token."""


def ending(codec: TextCodec, completion: Completion, text: str | None = None) -> Ending:
    """Return the end of a completion's text, or of `text`, which begins it."""
    tokens, text = completion.tokens, completion.text if text is None else text
    whole = codec.decode(tokens)
    begin = len(codec.decode(tokens[: completion.text_tokens.start]))  # after the thinking
    at = whole.find(text, begin)
    end = len(whole) if at < 0 else at + len(text)
    count, length = codec.spelled(tokens, whole[:end])
    return Ending(list(tokens[:count]), whole[length:end], whole[end:])


class _CallHandle(Handle):
    """Passes the result of a call to its program, and pieces of its text to the program's stream."""

    def __init__(self, sample: Sample, streamed: int | None) -> None:
        super().__init__(sample.handle.engine.wake, stream=sample.handle.streams and streamed is not None)
        self._sample = sample
        self._emitted[0, str] = streamed or 0

    @property
    def cancelled(self) -> bool:
        return self._sample.handle.cancelled

    def put(self, index: int, text: str) -> None:
        self._sample.emit(text)

    def finish(self, result: list[Completion] | BaseException) -> None:
        self._sample.receive(self, result)
