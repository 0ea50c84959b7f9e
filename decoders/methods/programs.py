"""Request programs: a sample that is decoded as several requests, which share its prefix in the cache.

A program is a generator. It yields calls, which the engine packs with all other requests, and gets their completions.
It returns the sample's completion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tot.decoders.budget import Account, Meter
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sequence import Handle, PolicyFactory
from tot.decoders.engine.text import Encoded, TextCodec, TextStream
from tot.decoders.errors import ModelError, TotError, describe
from tot.decoders.methods.choices import ScoreChoices
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.request import Completion, Part, Request


class Call(NamedTuple):
    """A request of a program."""

    request: Request
    policy: PolicyFactory
    streamed: int | None = None
    """None: its text is not streamed. Otherwise the number of its first characters that were streamed before."""


Program = Generator[Sequence[Call], list[Completion], Completion]


@dataclass(frozen=True)
class Sample:
    """A sample of a request, for its program."""

    request: Request
    prompt: list[int]
    index: int
    codec: TextCodec
    limit: int
    """Maximum number of tokens of its text, before an answer trigger."""
    thinking_limit: int
    policy: PolicyFactory
    account: Account
    emit: Callable[[str], None]
    """Streams a text that no call decoded."""

    def call(
        self,
        after: Sequence[int],
        drawn: int,
        policy: PolicyFactory | None = None,
        streamed: int | None = 0,
        **sampling: Any,
    ) -> Call:
        """Return a call that continues the prompt and the tokens `after` it, `drawn` of which were sampled."""
        own = self.request.sampling
        place = {"n": 1, "sample": own.sample + self.index, "drawn": own.drawn + drawn, "thinking_tokens": 0}
        changes = {"prompt": Encoded((*self.prompt, *after)), "sampling": own.model_copy(update={**place, **sampling})}
        changes |= {"answer_trigger": None, "choices": (), "close_choices": False, "steps": ()}
        return Call(self.request.model_copy(update=changes), policy or self.policy, streamed)

    def rationale(self, policy: PolicyFactory | None = None) -> Call:
        """Return the call for the text up to its end."""
        most = min(self.limit, self.request.sampling.max_tokens)
        return self.call((), 0, policy, max_tokens=most, thinking_tokens=self.thinking_limit)

    def answer(self, rationale: Completion, after: Sequence[int], rest: str = "") -> Program:
        """Append the trigger to a rationale, and the answer or the scores of the choices.

        `after` are the rationale's tokens to feed, and `rest` is the end of its text that they lack.
        """
        request, trigger = self.request, self.request.answer_trigger
        assert trigger is not None
        self.emit(trigger)
        begun = replace(rationale, text=rationale.text + trigger, parts=(*rationale.parts, Part("trigger", trigger)))
        ids = [*after, *self.codec.encode(rest + trigger)]
        call = self.call(ids, len(rationale.tokens), max_tokens=request.answer_tokens)
        if request.choices:
            call = call._replace(policy=partial(ScoreChoices, choices=self.codec.encode_choices(request)))
        (answer,) = yield [call]
        return replace(begun.then(answer), trajectory=rationale.trajectory)


def rationale_then_answer(sample: Sample) -> Program:
    """Decode a rationale to its end, and then the answer."""
    (rationale,) = yield [sample.rationale()]
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
    stream, count, length, decoded = TextStream(codec), 0, 0, 0
    for number, token in enumerate(tokens, 1):
        piece = stream.step(token)
        decoded += len(piece or "")
        if decoded > end:
            break
        if piece is not None:
            count, length = number, decoded
    return Ending(list(tokens[:count]), whole[length:end], whole[end:])


class ProgramHandle(Handle):
    """The handle of a request whose samples are decoded by programs."""

    def __init__(self, engine: Engine, prompt: int, samples: int, meter: Meter | None, stream: bool) -> None:
        """`prompt`: number of its tokens."""
        super().__init__(engine.wake, stream)
        self._prompt = prompt
        self._engine = engine
        self._meter = meter or Meter()
        self._started = time.monotonic()
        self._completions: list[Completion | None] = [None] * samples

    def start(self, programs: Sequence[Program]) -> list[tuple[Call, Handle]]:
        """Return the first calls of the programs, and their handles."""
        return [
            pair for index, program in enumerate(programs) for pair in _Run(self, index, program).calls(next(program))
        ]

    @property
    def streams(self) -> bool:
        return self._pieces is not None

    def submit(self, calls: Sequence[tuple[Call, Handle]]) -> None:
        submit_calls(self._engine, calls, self._meter)

    def emit_text(self, index: int, text: str) -> None:
        """Stream a piece of a sample's text."""
        if self.streams and text:
            self._put((index, text))

    def deliver(self, index: int, completion: Completion, reused: int) -> None:
        """Take the completion of a sample. The first one counts the prompt, of which `reused` tokens were cached."""
        usage = replace(
            completion.usage,
            prompt_tokens=0 if index else self._prompt,
            reused_prompt_tokens=0 if index else min(reused, self._prompt),
            new_tokens=len(completion.tokens),
            seconds=time.monotonic() - self._started,
        )
        self._completions[index] = replace(completion, usage=usage)
        done = [one for one in self._completions if one is not None]
        if len(done) == len(self._completions):
            self.finish(done)

    def fail(self, error: BaseException) -> None:
        """Settle the request with an error, and cancel the calls that still run."""
        self.finish(error if isinstance(error, TotError) else ModelError(f"decoding failed: {describe(error)}"))
        self.cancel()

    def finish(self, result: list[Completion] | BaseException) -> None:
        if not self.future.done():
            super().finish(result)


class _Run:
    """The program of one sample. After its first calls, it runs in the engine's thread."""

    def __init__(self, handle: ProgramHandle, index: int, program: Program) -> None:
        self.handle = handle
        self.index = index
        self._program = program
        self._results: dict[int, Completion] = {}
        self._calls = 0
        """Number of calls that run."""
        self._reused: int | None = None

    def calls(self, calls: Sequence[Call]) -> list[tuple[Call, Handle]]:
        """Return the next calls with their handles."""
        self._results, self._calls = {}, len(calls)
        return [(call, _CallHandle(self, number, call.streamed)) for number, call in enumerate(calls)]

    def receive(self, number: int, result: list[Completion] | BaseException) -> None:
        """Take the result of a call. After the last one, continue the program."""
        if isinstance(result, BaseException):
            self.handle.fail(result)
            return
        (completion,) = result
        if self._reused is None:
            self._reused = completion.usage.reused_prompt_tokens
        usage = replace(completion.usage, prompt_tokens=0, reused_prompt_tokens=0)
        self._results[number] = replace(completion, usage=usage)
        if len(self._results) < self._calls:
            return
        try:
            calls = self._program.send([self._results[i] for i in range(self._calls)])
            self.handle.submit(self.calls(calls))
        except StopIteration as end:
            self.handle.deliver(self.index, end.value, self._reused or 0)
        except Exception as error:  # the caller of the request handles it  # noqa: BLE001
            self.handle.fail(error)


class _CallHandle(Handle):
    """Passes the result of a call to its program, and pieces of its text to the program's stream."""

    def __init__(self, run: _Run, number: int, streamed: int | None) -> None:
        super().__init__(lambda: None, stream=run.handle.streams and streamed is not None)
        self._run = run
        self._number = number
        self._emitted[0, str] = streamed or 0

    @property
    def cancelled(self) -> bool:
        return self._run.handle.cancelled

    def _put(self, piece: tuple[int, str] | None) -> None:
        if piece is not None:
            self._run.handle.emit_text(self._run.index, piece[1])

    def finish(self, result: list[Completion] | BaseException) -> None:
        self._run.receive(self._number, result)


def submit_calls(engine: Engine, calls: Sequence[tuple[Call, Handle]], meter: Meter | None) -> None:
    """Queue calls, which start in the same step."""
    requests, policies = [call.request for call, _ in calls], [call.policy for call, _ in calls]
    engine.submit_all(requests, policies, meter, handles=[handle for _, handle in calls])


def start_programs(
    engine: Engine,
    request: Request,
    method: OpenedMethod,
    meter: Meter | None,
    stream: bool,
) -> tuple[ProgramHandle, list[tuple[Call, Handle]]]:
    """Return the handle of a request, and the first calls of its samples. Raises RequestError if it can never run."""
    prompt = engine.codec.encode_prompt(request.prompt)
    limit, thinking_limit = engine.limits(request, prompt)
    engine.check_slots(request, len(prompt), limit + engine.codec.after_rationale(request) + method.draft_rows)
    handle = ProgramHandle(engine, len(prompt), request.sampling.n, meter, stream)
    account = engine.accounts[request.purpose]
    samples = [
        Sample(
            request, prompt, index, engine.codec, limit, thinking_limit, method.policy, account,
            partial(handle.emit_text, index),
        )
        for index in range(request.sampling.n)
    ]  # fmt: skip
    program = method.program or rationale_then_answer
    return handle, handle.start([program(sample) for sample in samples])
