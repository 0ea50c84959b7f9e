"""Backend: route the requests of one search to decoders by purpose, and count their usage.

Requests made in one iteration of the event loop are sent together. There is no other batching here: a local decoder's
engine batches the requests of all running searches. Each request is delivered when it ends, and can be cancelled alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tot.decoders.budget import Meter
from tot.decoders.decoder import AsyncDecoder, Decoder, Pending
from tot.decoders.errors import ContextError, OptionError, RequestError, TotError, describe
from tot.decoders.request import Completion, FinishReason, Message, Part, Purpose, Request, Usage, before_stop
from tot.decoders.thinking import find_thinking, split
from tot.llm.replies import is_cut
from tot.running import in_thread

log = logging.getLogger(__name__)

_TEXT_ALONE: dict[Purpose, str] = {
    "generate": "generator='sample' in place of Enumerate(), or Enumerate(prior='uniform')",
    "escalate": "generator='sample'",
    "evaluate": "evaluator='value' or 'vote' in place of likelihoods",
    "answer": "a task without `choices`, such as a subclass whose `choices` returns ()",
}
"""Alternatives that need no scored choices, by purpose."""


_CHEAP_SAMPLES = 8
"""How many samples a decoder is assumed to decode together for little more than the time of one."""
_Sent = tuple[Request, asyncio.Future[list[Completion]]]
"""A request, and the future that its search awaits."""


def _loaded(decoder: Decoder | None) -> Any:
    """Return a decoder's LoadedModel, or None if it does not run locally."""
    engine = getattr(decoder, "engine", None)
    return None if engine is None else engine.loaded


def _model_name(decoder: Decoder) -> str:
    """Return the name of a decoder's model, or its class if the model has no name."""
    loaded = _loaded(decoder)
    model = getattr(decoder, "model", None) if loaded is None else loaded.name
    return model if isinstance(model, str) and model else type(decoder).__name__


def models_of(decoders: Mapping[Purpose, Decoder]) -> dict[Purpose, str]:
    """Return the name of the model of each purpose, or {} if all purposes have the same model.

    Paths are shortened to the file's name, unless two files have the same.
    """
    named = {purpose: _model_name(decoder) for purpose, decoder in decoders.items()}
    whole = set(named.values())
    if len({Path(name).name for name in whole}) == len(whole):
        named = {purpose: Path(name).name for purpose, name in named.items()}
    return named if len(whole) > 1 else {}


class Backend:
    """Router of requests to decoders. A decoder needs `generate(requests)`; with `start` it can stop in mid-text."""

    def __init__(
        self,
        decoders: Mapping[Purpose, Decoder],
        meter: Meter,
        filters: Mapping[Purpose, Mapping[str, float]] | None = None,
    ) -> None:
        self._decoders = decoders
        self.meter = meter
        self.filters = filters or {}
        """Sampling filters of the purposes whose model has its own."""
        self.models = models_of(decoders)
        self.calls = 0
        """Number of samples requested from decoders: n per request."""
        self.spent: defaultdict[str, tuple[int, Usage]] = defaultdict(lambda: (0, Usage()))
        """Number of completions received and their usage, by purpose. Cancelled completions count."""
        self.lost: Counter[FinishReason] = Counter()
        """Number of completions whose thinking left no answer, by the reason of their end."""
        self._repeats = False
        """Whether a text was cut because of repetitions."""
        self._stops_here: set[Purpose] = set()
        """Purposes whose decoder applies stop strings to thinking, so that it gets none."""
        self._refused: set[tuple[Purpose, str]] = set()
        """Constraints that a purpose's decoder refused, as JSON."""
        self._batches: dict[Purpose, list[_Sent]] = {}
        self._awaited: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Task[None]] = set()

    def can(self, purpose: Purpose) -> bool:
        """Return whether a decoder serves this purpose."""
        return purpose in self._decoders

    def name(self, purpose: Purpose) -> str | None:
        """Return the name of the decoder of a purpose, followed by "@" and its model if there are several; or None."""
        decoder = self._decoders.get(purpose)
        if decoder is None:
            return None
        name = str(getattr(decoder, "name", type(decoder).__name__))
        return f"{name}@{model}" if (model := self.models.get(purpose, name)) != name else name

    @property
    def by_purpose(self) -> dict[str, dict[str, int]]:
        """Calls, prompt tokens and new tokens by purpose."""
        return {
            purpose: {"calls": calls, "prompt_tokens": usage.prompt_tokens, "new_tokens": usage.new_tokens}
            for purpose, (calls, usage) in self.spent.items()
        }

    @property
    def by_model(self) -> dict[str, dict[str, int]]:
        """The same by model; empty if there is only one."""
        spent = self.by_purpose
        sums = {model: Counter(calls=0, prompt_tokens=0, new_tokens=0) for model in self.models.values()}
        for purpose, model in self.models.items():
            sums[model].update(spent.get(purpose, {}))
        return {model: dict(counts) for model, counts in sums.items()}

    @property
    def fingerprints(self) -> dict[Purpose, str]:
        """The name of each purpose's model, with a hash of its weights and chat template if it is local."""
        prints = {}
        for purpose, decoder in self._decoders.items():
            prints[purpose] = Path(_model_name(decoder)).name
            if (loaded := _loaded(decoder)) is not None:
                template = getattr(loaded.tokenizer, "chat_template", None)
                prints[purpose] += " " + hashlib.sha256(f"{loaded.identity} {template}".encode()).hexdigest()[:16]
        return prints

    def replay(self, calls: int, by_purpose: Mapping[str, Mapping[str, int]]) -> None:
        """Count the calls of an earlier part of the same search; `by_purpose` is as it was at the end of that part."""
        self.calls += calls
        for purpose, counts in by_purpose.items():
            usage = Usage(prompt_tokens=counts["prompt_tokens"], new_tokens=counts["new_tokens"])
            self.spent[purpose] = counts["calls"], usage

    def loaded(self, purpose: Purpose) -> Any:
        """Return the LoadedModel of the purpose's decoder, or None if it does not run locally."""
        return _loaded(self._decoders.get(purpose))

    @property
    def cheap_samples(self) -> int:
        """How many samples the generating decoder decodes together in at most 1.75 times the time of one."""
        return int(getattr(self._decoders.get("generate"), "cheap_samples", _CHEAP_SAMPLES))

    def call_reader(self, purpose: Purpose) -> Callable[[Completion], Any]:
        """Return the `read_calls` of the purpose's decoder. Raises OptionError if it has none."""
        if (read := getattr(self._decoders.get(purpose), "read_calls", None)) is None:
            what = f"decoder {self.name(purpose)} calls no functions, it has no `read_calls`"
            raise OptionError(f"{what}: use a local model, or leave the tools out")
        return read  # type: ignore[no-any-return]

    def cuts_rationales(self, purpose: Purpose) -> bool:
        """Return whether the purpose's decoder may cut rationales."""
        return bool(getattr(self._decoders.get(purpose), "cuts_rationales", False))

    async def complete(self, request: Request) -> list[Completion]:
        """Return the n completions of a request. Cancelling the call cancels the request.

        If the decoder applies stop strings to thinking, they are applied here, to the answers, from then on.
        """
        stops, spent = request.sampling.stop, [Usage()] * request.sampling.n
        if not stops or request.sampling.keep_stop:
            return await self._complete(request)
        if request.purpose not in self._stops_here:
            completions = await self._complete(request)
            if not any(one.finish_reason == "stop" and one.lacks_answer for one in completions):
                return completions
            self._stops_here.add(request.purpose)
            self.lost -= Counter(one.finish_reason for one in completions if one.lacks_answer)
            spent = [one.usage for one in completions]
        sampling = request.sampling.model_copy(update={"stop": ()})
        completions = await self._complete(request.model_copy(update={"sampling": sampling}))
        return [
            replace(_stopped(one, stops), usage=one.usage + earlier)
            for one, earlier in zip(completions, spent, strict=True)
        ]

    async def _complete(self, request: Request) -> list[Completion]:
        """Complete a request. If the decoder refuses its constraint, the search only checks the texts."""
        if (constraint := request.constraint) is None:
            return await self._requested(request)
        refused, free = (request.purpose, constraint.model_dump_json()), request.model_copy(update={"constraint": None})
        if refused in self._refused:
            return await self._requested(free)
        try:
            return await self._requested(request)
        except ContextError:
            raise
        except RequestError as error:
            self.calls -= request.sampling.n
            completions = await self._requested(free)
            if not self._refused:
                name = self.name(request.purpose)
                log.warning("decoder %s writes texts of any form, which are only checked: %s", name, error)
            self._refused.add(refused)
            return completions

    async def _requested(self, request: Request) -> list[Completion]:
        self.calls += request.sampling.n
        batch = self._batches.get(request.purpose)
        if batch is None:
            batch = self._batches[request.purpose] = []
            self._spawn(self._send(request.purpose, batch))
        received: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._awaited.add(received)
        received.add_done_callback(self._awaited.discard)
        batch.append((request, received))
        return await received

    async def cancel(self) -> None:
        """Cancel the requests that still run, and wait until all are counted."""
        for awaited in [*self._awaited]:
            awaited.cancel()
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _send(self, purpose: Purpose, batch: list[_Sent]) -> None:
        await asyncio.sleep(0)  # wait for other requests in this iteration of the event loop
        self._batches.pop(purpose)
        live = [(request, received) for request, received in batch if not received.done()]
        try:
            started = self._start(purpose, [request for request, _ in live]) if live else []
        except BaseException as error:  # the searches handle it  # noqa: BLE001
            for _, received in live:
                _settle(received, error)
            return
        for (request, received), pending in zip(live, started, strict=True):
            received.add_done_callback(partial(_cancel_with, pending))
            self._spawn(self._receive(request, received, pending))

    async def _receive(self, request: Request, received: asyncio.Future[list[Completion]], pending: Pending) -> None:
        """Count the completions of a request and deliver them."""
        try:
            completions = [_read(request, completion) for completion in await pending]
            self.meter.receive(completions)
            for completion in completions:
                if completion.lacks_answer and not request.sampling.keep_stop:
                    self.lost[completion.finish_reason] += 1
                if completion.finish_reason == "repetition" and not self._repeats:
                    self._repeats = True
                    log.warning(
                        "a text was cut because it repeats the same tokens without end: use a larger model, other "
                        "weights (--quantize none) or a higher temperature"
                    )
                calls, usage = self.spent[request.purpose]
                self.spent[request.purpose] = calls + 1, usage + completion.usage
                self._check_choices(request, completion)
        except BaseException as error:  # the search handles it  # noqa: BLE001
            _settle(received, error)
        else:
            _settle(received, completions)

    def _start(self, purpose: Purpose, requests: Sequence[Request]) -> Sequence[Pending]:
        """Start requests. Returns the pending completions of each."""
        decoder = self._decoders.get(purpose)
        if decoder is None and purpose == "escalate":
            raise RequestError("the search asks a second model, but none was given: add one for escalate, --escalate")
        if decoder is None:
            raise RequestError(
                "the search needs a model, but none was given: give model=..., or a generator and an evaluator that "
                "need none, such as Enumerate(prior='uniform') and Heuristic() if the task supports them"
            )
        if isinstance(decoder, AsyncDecoder):
            return decoder.start(requests, self.meter)
        results = asyncio.ensure_future(self._in_thread(decoder, purpose, requests))
        self._awaited.add(results)
        results.add_done_callback(self._awaited.discard)

        async def result_of(index: int) -> list[Completion]:
            return (await asyncio.shield(results))[index]

        return [asyncio.ensure_future(result_of(index)) for index in range(len(requests))]

    async def _in_thread(
        self, decoder: Decoder, purpose: Purpose, requests: Sequence[Request]
    ) -> list[list[Completion]]:
        flat = await in_thread(partial(self._generate, decoder, purpose, list(requests)), "tot-decoder")
        expected = sum(request.sampling.n for request in requests)
        if not isinstance(flat, list | tuple) or not all(isinstance(getattr(one, "text", None), str) for one in flat):
            raise OptionError(
                f"decoder {self.name(purpose)} returned {flat!r:.80}: its `generate` must return a list of "
                "Completions, the text of each a str"
            )
        if len(flat) != expected:
            raise OptionError(
                f"decoder {self.name(purpose)} returned {len(flat)} completions instead of {expected}: its `generate` "
                "must return request.sampling.n of them for each request, in one list"
            )
        self.meter.count(new_tokens=sum(one.usage.new_tokens for one in flat))
        remaining = iter(flat)
        return [list(islice(remaining, request.sampling.n)) for request in requests]

    def _generate(self, decoder: Decoder, purpose: Purpose, requests: list[Request]) -> Any:
        """Return a decoder object's completions. Raises RequestError, naming the decoder, if its code fails."""
        try:
            return decoder.generate(requests)
        except TotError:
            raise
        except (Exception, SystemExit) as error:
            raise RequestError(f"decoder {self.name(purpose)} raised {describe(error)}") from error

    def _check_choices(self, request: Request, completion: Completion) -> None:
        """Raise OptionError if the decoder did not score all choices. Not every decoder can."""
        expected, scored = len(request.choices), len(completion.choice_logprobs)
        if expected != scored and not is_cut(completion):
            raise OptionError(
                f"decoder {self.name(request.purpose)} scored {scored} of {expected} choices, but all are needed: "
                "return `choice_logprobs`, one for each of request.choices, or use it for text only "
                f"({_TEXT_ALONE[request.purpose]})"
            )


def _read(request: Request, completion: Completion) -> Completion:
    """Separate the thinking in the text of a decoder object that returns no parts."""
    if completion.parts or not completion.text:
        return completion
    last = request.prompt[-1]
    prefix = last.content if isinstance(last, Message) and last.role == "assistant" else ""
    awaits = find_thinking(prefix).awaits
    if request.sampling.keep_stop:
        end = find_thinking(completion.text, awaits).end
        parts = Part("thinking", completion.text[:end]), Part("exact", completion.text[end:])
        return replace(completion, parts=parts) if end else completion
    thinking, text = split(completion.text, awaits)
    parts = Part("thinking", thinking), Part("exact", text)
    return replace(completion, text=text, parts=parts) if text != completion.text else completion


def _stopped(completion: Completion, stops: Sequence[str]) -> Completion:
    """Return a completion up to the first stop string."""
    text = before_stop(completion.text, stops)
    if text == completion.text:
        return completion
    *parts, last = completion.parts or (Part("exact", ""),)
    return replace(completion, text=text, finish_reason="stop", parts=(*parts, replace(last, text=text)))


def _settle(received: asyncio.Future[list[Completion]], result: list[Completion] | BaseException) -> None:
    """Deliver a result or an error, unless the search has cancelled the call."""
    if received.done():
        return
    if isinstance(result, asyncio.CancelledError):
        received.cancel()
    elif isinstance(result, BaseException):
        received.set_exception(result)
    else:
        received.set_result(result)


def _cancel_with(pending: Pending, received: asyncio.Future[list[Completion]]) -> None:
    if received.cancelled():
        pending.cancel()
