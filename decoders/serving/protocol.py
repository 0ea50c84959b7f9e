"""Request bodies of the API: OpenAI's supported fields and additional ones. `requests_of` makes decoder requests.

An unsupported field that would change the result is rejected by name. With null or its neutral value (`"tools": []`,
`"frequency_penalty": 0`) it is ignored, as are fields without effect (`user`, `metadata`). Checks that need a tokenizer
(lengths) follow when requests are submitted.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tot.decoders.request import Message, Request, Sampling
from tot.decoders.serving.errors import ServingError, unsupported
from tot.decoders.serving.limits import Limits

_HARMLESS = frozenset(
    "cache_prompt client_metadata metadata prompt_cache_key prompt_cache_retention safety_identifier service_tier "  # noqa: SIM905
    "store user verbosity".split()
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("annotations", "functions", "stop_token_ids", "tool_calls", "tools"), ([],)),
    **dict.fromkeys(("frequency_penalty", "min_tokens", "presence_penalty"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "repeat_penalty", "repetition_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("early_stopping", "echo", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("none", "auto"),
}
"""Values of unsupported fields that have no effect."""
_TEXT_TOKENS = 16
"""The default `max_tokens` of a text completion, as in OpenAI's API."""
_MOST_PARTS = 128
"""Maximum number of choices or steps."""


class Body(BaseModel):
    """A JSON object. Unknown fields are refused; null, harmless fields and neutral values are dropped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    harmless: ClassVar[Collection[str]] = _HARMLESS
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _without_ignored_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None and not cls._ignores(name, value)}

    @classmethod
    def _ignores(cls, name: str, value: Any) -> bool:
        return name in cls.harmless or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in cls.neutral.get(name, ())
        )


class ModelName(Body):
    """The model of a body whose other fields are not read yet."""

    model_config = ConfigDict(extra="ignore")

    model: str


def _joined(content: Any) -> Any:
    """Return the content as text, joining a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"a part has type {str(kind)[:40]!r}, and only text is supported: remove it")
        named = {name for name, value in part.items() if value or name not in ("annotations", "logprobs")}
        if named - {"cache_control"} != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part must be {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in content)


def _known_role(role: Any) -> Any:
    if role in ("tool", "function"):
        raise ValueError(f"tools are not supported, so a message cannot have the role {role!r}: remove it")
    return "system" if role == "developer" else role


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _unsigned(seed: Any) -> Any:
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        return None if seed == -1 else seed % 2**53
    return seed


def _all_as_zero(top_k: Any) -> Any:
    return 0 if top_k == -1 else top_k


class ChatMessage(Body):
    """One message. `developer` is `system`; `content` is text or a list of text parts."""

    harmless: ClassVar[Collection[str]] = frozenset(
        "audio cache_control name provider_specific_fields reasoning reasoning_content reasoning_details refusal "  # noqa: SIM905
        "thinking_blocks".split()
    )
    """Clients send back the fields of a reply."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_known_role)]
    content: Annotated[str, BeforeValidator(_joined)]

    @model_validator(mode="before")
    @classmethod
    def _without_calls(cls, given: Any) -> Any:
        if isinstance(given, dict) and (given.get("tool_calls") or given.get("function_call")):
            raise ValueError("tools are not supported, so a message cannot call one (tool_calls): remove it")
        if isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None:
            return {**given, "content": ""}  # a reply that has only thoughts
        return given


class DecodedMessage(ChatMessage):
    """A message, with its tokens if the model generated it and continues it."""

    written: list[Annotated[tuple[Annotated[int, Field(ge=0)], list[int]], Field(strict=False)]] = []
    """As `Message.written`: the tokens of an assistant message that the model generated, by position in the text."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class GenerationBody(Body):
    """Fields of all routes. Temperature and filters default to the model's own, otherwise to OpenAI's defaults.

    Without `seed`, each request gets a random one below 2**53, which the reply reports (`tot.seed`).
    """

    model: str
    """The served model, `model:decoder` to select another decoding method, or `model:search`."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, BeforeValidator(_all_as_zero), Field(ge=0)] = 0
    """0 or -1 keeps all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**64)] | None, BeforeValidator(_unsigned)] = None
    """None or -1: a random seed."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]], BeforeValidator(_as_list), Field(max_length=16)
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    """Limits a search. A decoding method ignores it."""

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of the stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: set stream, or remove it")
        return self


class DecodingBody(GenerationBody):
    """Fields of both routes of decoders.

    Other fields of `Sampling` and `Request` mean the same here: keep_stop, drawn, ignore_eos, purpose, answer_trigger,
    whole_rationale, steps, choices and close_choices. The reply's `parts` separate rationale and answer, and
    `choice_logprobs` has the logprob (`total`, nats) and the number of `tokens` of each choice.
    """

    model_config = ConfigDict(extra="allow")

    n: Annotated[int, Field(ge=1)] = 1
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """As `Sampling.thinking_tokens`, up to the server's limit."""
    answer_tokens: Annotated[int, Field(ge=1)] = 32
    """As `Request.answer_tokens`."""
    return_token_ids: bool = False
    """Include the new tokens (`token_ids`), their logprobs (`token_logprobs`) and the finish reason (`finish`: stop,
    eos, length, ...) in each choice."""


class ChatBody(DecodingBody):
    """`POST /v1/chat/completions`. `max_tokens` defaults to the server's limit."""

    echo: ClassVar = False
    messages: Annotated[list[DecodedMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    """Return the logprobs of the new tokens, before temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    continue_final_message: bool | None = None
    """Accepted only as true for a last message of the assistant, which is always continued, and false for others."""
    add_generation_prompt: bool | None = None
    """Accepted only as the opposite of `continue_final_message`."""

    @property
    def alternatives(self) -> int | None:
        """Number of top logprobs per token; None if logprobs are not requested."""
        return self.top_logprobs if self.logprobs else None

    @property
    def prompts(self) -> list[tuple[Message, ...]]:
        messages = [Message(**message.model_dump()) for message in self.messages]
        empty = len(messages) > 1 and messages[-1].role == "assistant" and not messages[-1].content.strip()
        return [tuple(messages[:-1] if empty else messages)]  # an empty text has no continuation

    def most_tokens(self, limits: Limits) -> int:
        """Return the maximum of new tokens of a text."""
        given = [most for most in (self.max_tokens, self.max_completion_tokens) if most is not None]
        return min(given, default=limits.max_tokens)

    def conflicts(self, request: Request) -> Iterator[tuple[Any, str, str]]:
        """Yield, for each rule of this route: whether it is broken, the field, and the message."""
        last = self.messages[-1].role
        yield self.max_tokens == 0, "max_tokens", "max_tokens is 0: request at least one token"
        yield self.top_logprobs and not self.logprobs, "top_logprobs", "top_logprobs needs logprobs"
        for field, right in (("continue_final_message", "true"), ("add_generation_prompt", "false")):
            wrong = getattr(self, field) is ((last == "assistant") != (right == "true"))
            yield wrong, field, f"{field} is {right} for a last message of the assistant, and its role is {last}"


class TextBody(DecodingBody):
    """`POST /v1/completions`. `max_tokens` defaults to 16, as in OpenAI's API.

    `echo` with `max_tokens` 0 and `logprobs` scores the tokens of the prompt and draws nothing.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text, token ids, or a list of either. Control tokens in text are plain text; ids are used unchanged."""
    echo: bool = False
    alternatives: Annotated[int, Field(ge=0, le=20)] | None = Field(None, validation_alias="logprobs")
    """Number of top logprobs per token, before temperature and filters."""

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        prompts: Any = self.prompt if several else [self.prompt]
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]

    def most_tokens(self, limits: Limits) -> int:
        """Return the maximum of new tokens of a text."""
        return min(_TEXT_TOKENS, limits.max_tokens) if self.max_tokens is None else self.max_tokens

    def conflicts(self, request: Request) -> Iterator[tuple[Any, str, str]]:
        """Yield, for each rule of this route: whether it is broken, the field, and the message."""
        for field in ("choices", "answer_trigger"):
            yield self.echo and getattr(request, field), "echo", f"echo does not support {field}: remove it"
        yield self.echo and self.stream, "echo", "echo does not support streams: remove echo or stream"
        scores = request.choices or (self.echo and self.alternatives is not None and self.n == 1)
        how = "request at least one token, or score the prompt with echo, logprobs and n=1"
        yield self.max_tokens == 0 and not scores, "max_tokens", f"max_tokens is 0: {how}"


def requests_of(body: ChatBody | TextBody, method: str, limits: Limits, defaults: Mapping[str, float]) -> list[Request]:
    """Make one decoder request per prompt. Each has its own random seed if the client gave none.

    Args:
        body: The body of the HTTP request.
        method: The decoding method.
        limits: The limits of the server.
        defaults: The model's own temperature and filters.

    Raises:
        ServingError: The fields contradict each other or a limit, or the method would ignore one.
        ValidationError: A prompt or a field of `Sampling` or `Request` is invalid.
    """
    check_tokens(body, limits, "max_tokens", "max_completion_tokens", "answer_tokens")
    prompts = body.prompts
    if (samples := len(prompts) * body.n) > limits.max_samples:
        message = f"{samples} samples (prompts times n) exceed the limit of {limits.max_samples}: request fewer"
        raise ServingError(400, message, "n", "too_many_samples")
    sampling = body.model_dump(include=set(Sampling.model_fields))
    sampling |= {name: value for name, value in defaults.items() if name not in body.model_fields_set}
    sampling |= {"thinking_tokens": min(body.thinking_tokens, limits.max_tokens)}
    sampling |= {"max_tokens": max(1, body.most_tokens(limits))}
    fields = {name: value for name, value in (body.model_extra or {}).items() if name not in Sampling.model_fields}
    for name in fields.keys() - (Request.model_fields.keys() - {"prompt", "sampling"}):
        raise unsupported(name)
    fields |= {"answer_tokens": min(body.answer_tokens, limits.max_tokens)}
    requests = []
    for prompt in prompts:
        sampling |= {"seed": secrets.randbits(53) if body.seed is None else body.seed}
        requests.append(Request.model_validate({**fields, "prompt": prompt, "sampling": Sampling(**sampling)}))
    for broken, field, message in (*body.conflicts(requests[0]), *_conflicts(body, requests[0], method)):
        if broken:
            raise ServingError(400, message, field, "invalid_value")
    return requests


def check_tokens(body: GenerationBody, limits: Limits, *fields: str) -> None:
    """Raise ServingError if one of these fields is above the limit on the tokens of a text."""
    for field in fields:
        value = getattr(body, field, None) if field in body.model_fields_set else None
        if value is not None and value > limits.max_tokens:
            message = f"{field} is {value} and this server's limit is {limits.max_tokens}: request fewer"
            raise ServingError(400, message, field, "above_limit")


def _conflicts(body: ChatBody | TextBody, request: Request, method: str) -> Iterator[tuple[Any, str, str]]:
    """Yield the rules of both routes, and those about fields that a method would ignore or cannot compute."""
    for field in ("choices", "steps"):
        count = len(getattr(request, field))
        yield count > _MOST_PARTS, field, f"{count} {field} exceed the limit of {_MOST_PARTS}: send fewer"
    yield body.stream and request.choices, "stream", "scores of choices cannot be streamed: remove stream"
    for field, given in (("keep_stop", request.sampling.keep_stop), ("return_token_ids", body.return_token_ids)):
        yield body.stream and given, "stream", f"{field} does not support streams: remove stream"
    for field in ("answer_tokens", "whole_rationale"):
        alone = field in body.model_fields_set and request.answer_trigger is None
        yield alone, field, f"{field} needs an answer trigger: give answer_trigger too"
    other = f"this request is for {method}: use the model {body.model.partition(':')[0]}:pdos"
    yield request.steps and method != "pdos", "steps", f"steps are only for pdos, and {other}"
    if body.alternatives is not None:
        values = {"stream": body.stream, "choices": request.choices, "answer_trigger": request.answer_trigger}
        for field, value in values.items():
            yield value, "logprobs", f"logprobs do not support {field}: remove {field} or logprobs"
        message = "logprobs do not support parallel steps, which do not attend to one another: remove logprobs"
        yield method == "pdos", "logprobs", message
