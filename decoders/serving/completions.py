"""Completions by the decoding methods of one model, selected by name.

All methods share one engine, so the requests of all clients are decoded in the same packed forward passes. A request
is cancelled, which frees its slots, when its caller stops waiting.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from tot.decoders.budget import Budget, Meter
from tot.decoders.constraint import Constraint
from tot.decoders.decoder import LocalDecoder, find_method, load_decoder, method_names
from tot.decoders.engine.sequence import Call, Handle, ThinkingPiece
from tot.decoders.errors import ContextError, RequestError
from tot.decoders.remote.loop import together
from tot.decoders.request import Completion, Request, Sampling, ThinkingOptions, ToolCall, Usage
from tot.decoders.serving.errors import ServingError, invalid, unsupported
from tot.decoders.serving.gate import Gate, closing, late
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.logprobs import Scored, TextScoring, chat_logprobs, text_logprobs
from tot.decoders.serving.messages_body import MessagesBody
from tot.decoders.serving.metrics import ServerMetrics
from tot.decoders.serving.protocol import GenerationBody, TextBody
from tot.decoders.serving.service import AnyBody, Choice, Emit, Piece, Result
from tot.decoders.tools import CallStream


class DecodingMethods:
    """Serves a decoder as `name`, and each method as `name:method`, created at its first request.

    Each method gets the `options` that it has. The caller closes the decoder. `sampling` has the model's own
    temperature and filters.
    """

    def __init__(
        self,
        name: str,
        decoder: LocalDecoder,
        limits: Limits,
        options: Mapping[str, Any] | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.gate = Gate(limits.concurrency, limits)
        self.limits = limits
        self.engine = decoder.engine
        methods = [method for method in method_names() if not find_method(method).needs_trigger]
        self._methods = {name: decoder.name, **{f"{name}:{method}": method for method in methods}}
        self.models: Mapping[str, Mapping[str, Any]] = {
            model: {"tot": {"decoder": method}} for model, method in self._methods.items()
        }
        self._options = dict(options or {})
        self._sampling = dict(sampling or {})
        self._decoders = {decoder.name: decoder}
        self._created = ExitStack()
        self._creating = threading.Lock()

    @property
    def failed(self) -> str | None:
        """The error of a failed engine; None while it works."""
        return None if self.engine.failed is None else str(self.engine.failed)

    def watch(self, metrics: ServerMetrics) -> None:
        metrics.watch_gate("requests", self.gate)
        metrics.watch_engine(self.engine)

    def work(self, body: AnyBody) -> Decoding:
        """Prepare a request. Raises ServingError, or pydantic's ValidationError if a field is invalid."""
        if "x_tot" in body.model_fields_set:
            raise unsupported("x_tot")
        method = self._methods[body.model]
        requests = self._requests(body)
        _check(body, requests[0], method)
        return Decoding(self, body, method, requests, {"decoder": method, "seed": requests[0].sampling.seed})

    def close(self) -> None:
        """Close all decoders created by this object."""
        self._created.close()

    def decoder(self, method: str) -> LocalDecoder:
        """Return the decoder of a method, created on demand. It may take seconds: call it in a thread."""
        if method not in self._decoders:
            with self._creating:
                if method not in self._decoders:
                    fields = find_method(method).options.model_fields
                    options = {key: value for key, value in self._options.items() if key in fields}
                    decoder = load_decoder(method, engine=self.engine, **options)
                    self._decoders[method] = self._created.enter_context(decoder)
        return self._decoders[method]

    def _requests(self, body: AnyBody) -> list[Request]:
        """Make one decoder request per prompt. Each has its own random seed if the client gave none."""
        most = self.limits.max_tokens_limit
        if not isinstance(body, MessagesBody):
            check_tokens(body, self.limits, "max_tokens", "max_completion_tokens")
        fields = body.model_dump(include=Request.model_fields.keys() - {"prompt"})
        if body.form is not None:
            if fields.get("constraint"):
                raise invalid(f"constraint and {body.form_field} are both given: remove one", body.form_field)
            fields["constraint"] = body.form
        if fields.get("tool_choice") == "none":
            fields["tools"] = ()
        fields["template_options"] = getattr(body, "chat_template_kwargs", {})
        sampling = body.model_dump(include=set(Sampling.model_fields))
        sampling |= {name: value for name, value in self._sampling.items() if name not in body.model_fields_set}
        sampling["thinking"] = thinking_of(body, self.limits)
        sampling["max_tokens"] = min(one for one in (most, body.max_tokens, body.most_tokens) if one is not None) or 1
        prompts = body.prompts
        limit = self.limits.max_samples
        if (samples := len(prompts) * sampling.get("n", 1)) > limit:
            message = f"{samples} samples (prompts times n) exceed the limit of {limit}: request fewer"
            raise ServingError(400, message, "n", "too_many_samples")
        seeds = [secrets.randbits(53) if body.seed is None else body.seed for _ in prompts]
        return [
            Request.model_validate({**fields, "prompt": prompt, "sampling": Sampling(**sampling | {"seed": seed})})
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]


def check_tokens(body: GenerationBody, limits: Limits, *fields: str) -> None:
    """Raise ServingError if one of these fields is above the limit on the tokens of a text."""
    for field in fields:
        value = getattr(body, field, None) if field in body.model_fields_set else None
        if value is not None and value > limits.max_tokens_limit:
            message = f"{field} is {value} and this server's limit is {limits.max_tokens_limit}: request fewer"
            raise ServingError(400, message, field, "above_limit")


_BUDGETS: Mapping[str, Any] = {"none": "off", "minimal": "low", "xhigh": "high"}


class _Limited(ThinkingOptions):
    """Options whose budget has a name, which may mean more tokens than a server allows."""

    most: Annotated[int, Field(exclude=True)]

    @property
    def tokens(self) -> int:
        return min(super().tokens, self.most)


def thinking_of(body: GenerationBody, limits: Limits, counted: bool = True) -> ThinkingOptions:
    """Return how the model thinks. `counted`: whether thinking counts towards `max_tokens`, unless the body says.

    Without `counted`, for a search, the effort is not a budget of the thinking. Raises ServingError for contradictory
    fields, and for a budget above the limit.
    """
    given, most = body.thinking, limits.max_tokens_limit
    budgets = {"thinking": given.budget} if given.budget != "auto" else {}
    if body.thinking_budget is not None:
        budgets["thinking_budget"] = body.thinking_budget
    if counted and body.effort is not None:
        budgets["reasoning_effort"] = _BUDGETS.get(body.effort, body.effort)
    amounts = {field: ThinkingOptions(budget=budget).tokens for field, budget in budgets.items()}
    if len(set(amounts.values())) > 1:
        named = " and ".join(amounts)
        raise invalid(f"{named} set different budgets of the thinking: give one of them", [*amounts][-1])
    for field, budget in budgets.items():
        if isinstance(budget, int) and budget > most:
            message = f"{field} is {budget} and this server's limit is {most}: request fewer"
            raise ServingError(400, message, field, "above_limit")
    about = {"counted": counted, **given.model_dump(exclude_unset=True), "budget": [*budgets.values(), "auto"][0]}
    return _Limited(**about, most=most)


def _check(body: AnyBody, request: Request, method: str) -> None:
    """Raise ServingError if fields contradict one another, or the method cannot compute the logprobs."""
    scored, sampling = body.alternatives is not None, request.sampling
    if request.choices and (scored or body.echo):
        raise invalid("choices do not support logprobs and echo: remove them", "logprobs")
    for field, given in (("logprobs", scored), ("echo", body.echo), ("keep_stop", sampling.keep_stop)):
        if body.stream and given:
            raise invalid(f"{field} does not support streams: remove stream", "stream")
    if scored and method == "pdos":
        raise invalid("logprobs do not support parallel steps: remove logprobs", "logprobs")
    for field, form in (("tools", request.tools), (body.form_field or "constraint", request.constraint)):
        if form and method == "pdos":
            raise invalid(f"{field} does not support parallel steps: use another decoder", field)
    if body.max_tokens == 0 and not request.choices and not (body.echo and scored and sampling.n == 1):
        message = "max_tokens is 0: request at least one token, or score the prompt with echo, logprobs and n=1"
        raise invalid(message, "max_tokens")


@asynccontextmanager
async def _submitted(submit: Callable[[], list[Handle]]) -> AsyncIterator[list[Handle]]:
    """Yield the handles from `submit`, which runs in a thread because it tokenizes. Cancels unfinished ones."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        yield await asyncio.shield(submitting)
    finally:
        submitting.add_done_callback(_cancel_handles)  # when the thread has ended, also if this task is cancelled


def _cancel_handles(submitting: asyncio.Future[list[Handle]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        for handle in submitting.result():
            if not handle.future.done():
                handle.cancel()


@dataclass(frozen=True, slots=True)
class Decoding:
    """The work of one HTTP request: one decoder request per prompt, all decoded by the same method."""

    source: DecodingMethods
    body: AnyBody
    method: str
    requests: Sequence[Request]
    about: Mapping[str, Any]

    def count(self) -> int:
        if self.requests[0].tools:
            self.source.decoder(self.method).calls  # noqa: B018  # chooses the form, which the prompt describes
        codec = self.source.engine.codec
        return sum(len(codec.encode_prompt(one.prompt, codec.options_of(one))) for one in self.requests)

    async def run(self, emit: Emit, seconds: float) -> Result:
        """Decode the completions, and score them if logprobs are requested."""
        body, source, meter = self.body, self.source, Meter(Budget(seconds=seconds))
        prompts: list[list[int]] = []
        await asyncio.to_thread(self._compile)
        if body.echo or body.alternatives is not None:
            codec = source.engine.codec
            encode = lambda one: codec.encode_prompt(one.prompt, codec.options_of(one))  # noqa: E731
            prompts = await asyncio.to_thread(lambda: [*map(encode, self.requests)])
        if body.max_tokens == 0 and not self.requests[0].choices:
            completions = [[Completion("", (), 0.0, "length", Usage(prompt_tokens=len(ids)))] for ids in prompts]
        else:
            submit = lambda: source.decoder(self.method).submit(self.requests, meter, body.stream)  # noqa: E731
            async with _submitted(submit) as handles:
                streams = [partial(self._sent, emit, i, handle) for i, handle in enumerate(handles)]
                completions = await together(streams)
            self._check_complete(completions)
        samples = [(i, one) for i, completed in enumerate(completions) for one in completed]
        scores: list[Scored | None] = [None] * len(samples)
        if body.alternatives is not None:
            scores = await self._scored([(prompts[i], one) for i, one in samples], meter)
        echoes = [self._echo(i, prompts) if body.echo else "" for i, _ in samples]
        choices = [
            self._choice(index, one, echo, score)
            for index, ((_, one), echo, score) in enumerate(zip(samples, echoes, scores, strict=True))
        ]
        usage = sum((one.usage for _, one in samples), Usage())
        thinking = sum(part.tokens for _, one in samples for part in one.parts if part.kind == "thinking")
        return Result(choices, usage, thinking)

    def _compile(self) -> None:
        """Compile the constraints, which are cached. Raises ServingError, which names the field."""
        engine, request = self.source.engine, self.requests[0]

        def check(field: str, constraint: Constraint, **parts: Constraint) -> None:
            try:
                engine.grammars.matcher(constraint)
            except RequestError as error:
                for name, part in parts.items():
                    check(name, part)
                raise invalid(str(error), field) from None

        if request.constraint is not None:
            check(self.body.form_field or "constraint", request.constraint)
        if request.tools:
            schemas = {f"tools.{i}": Constraint(json_schema=tool.parameters) for i, tool in enumerate(request.tools)}
            check("tools", self.source.decoder(self.method).calls.constraint(request, engine.codec.control), **schemas)

    async def _sent(self, emit: Emit, i: int, handle: Handle) -> list[Completion]:
        """Return the completions of prompt `i`, and emit the pieces of a stream."""
        first = i * self.requests[i].sampling.n
        calls = bool(self.requests[i].tools)
        streams = defaultdict[int, CallStream](lambda: CallStream(self.source.engine.codec.calls))
        if self.body.stream:
            async for sample, text in handle:
                if not calls or isinstance(text, ThinkingPiece):
                    emit(Piece(first + sample, text, isinstance(text, ThinkingPiece)))
                else:
                    for piece, call in streams[sample].feed(text):
                        emit(Piece(first + sample, piece, call=call))
        completions = await handle
        if self.body.stream:
            self._check_complete([completions])
            for sample, completion in enumerate(completions):
                for piece, call in streams[sample].feed("", final=True) if calls else ():
                    emit(Piece(first + sample, piece, call=call))
                emit(self._choice(first + sample, completion))
        return completions

    def _check_complete(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Raise ServingError if a stop of the server cancelled a completion, or the time limit left no tokens."""
        samples = [sample for one in completions for sample in one]
        reasons = {sample.finish_reason for sample in samples}
        if "cancelled" in reasons:
            raise closing()
        if "budget" in reasons and not any(sample.tokens for sample in samples):
            raise late(self.source.limits)

    def _choice(self, index: int, completion: Completion, echo: str = "", scored: Scored | None = None) -> Choice:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields |= {"token_ids": completion.tokens, "token_logprobs": completion.logprobs}
            fields |= {"finish": completion.finish_reason, "parts": [asdict(part) for part in completion.parts]}
        if completion.choice_logprobs:
            fields["choice_logprobs"] = [asdict(choice) for choice in completion.choice_logprobs]
        if scored is not None:
            to_json = text_logprobs if isinstance(self.body, TextBody) else chat_logprobs
            fields["logprobs"] = to_json(scored, self.source.engine.codec)
        cut = completion.finish_reason not in ("eos", "stop")
        incomplete = cut and self.body.max_tokens is None
        text, calls = completion.text, list[ToolCall]()
        if self.requests[0].tools:
            text, calls = self.source.engine.codec.calls.parse(text)
        stopped = completion.finish_reason == "stop"
        return Choice(index, echo + text, completion.thinking, cut, incomplete, fields, calls=calls, stopped=stopped)

    def _echo(self, i: int, prompts: list[list[int]]) -> str:
        prompt = self.requests[i].prompt
        return prompt if isinstance(prompt, str) else self.source.engine.codec.decode(prompts[i])

    async def _scored(self, samples: Sequence[tuple[list[int], Completion]], meter: Meter) -> list[Scored | None]:
        """Return the logprobs of the tokens of each text and, with `echo`, of all tokens before it but the first."""
        engine, scores, calls = self.source.engine, list[Scored | None](), list[Call]()
        for prompt, completion in samples:
            ids = [*prompt, *self._before_text(completion)]
            given = ids if self.body.echo else []
            if len(given) + len(completion.tokens) > (context := engine.runner.context):
                tokens = f"the prompt has {len(ids)} tokens and the model's context holds {context}"
                raise ContextError(f"{tokens}: shorten the prompt")
            scored = Scored([*given, *completion.tokens[completion.text_tokens]], min(1, len(given)))
            scores.append(scored)
            if len(scored.tokens) > scored.unscored:
                head = tuple(scored.tokens[: scored.unscored] or ids)
                request = Request(prompt=head, sampling=Sampling(max_tokens=1), purpose="evaluate")
                policy = partial(TextScoring, text=scored, top=self.body.alternatives or 0)
                calls.append(Call(request, policy, Handle(engine.wake, stream=False)))

        def submit() -> list[Handle]:
            engine.submit(calls, meter)
            return [call.handle for call in calls]

        async with _submitted(submit) as handles:
            self._check_complete([await handle for handle in handles])
        return scores

    def _before_text(self, completion: Completion) -> list[int]:
        """Return the tokens of the thinking, and the ones that closed it."""
        codec = self.source.engine.codec
        encoders = {"closing": codec.encode_control, "trigger": codec.encode}
        forced = [encoders[part.kind](part.text) for part in completion.parts if part.kind in encoders]
        sampled = completion.tokens[: completion.text_tokens.start]
        return [*(token for token in sampled if token not in codec.end_ids), *chain(*forced)]
