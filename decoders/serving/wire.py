"""Request bodies of the API: OpenAI's supported fields and additional ones. `asked` converts them to decoder requests.

An unsupported field that would change the result is rejected by name. With null or its neutral value (`"tools": []`,
`"frequency_penalty": 0`) it is ignored, as are fields without effect (`user`, `metadata`). Checks that need a tokenizer
(lengths) follow when requests are submitted.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tot.decoders.request import Message, Purpose, Request, Sampling
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits

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


class Wire(BaseModel):
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


class Named(Wire):
    """The model of a body whose other fields are not read yet."""

    model_config = ConfigDict(extra="ignore")

    model: str


def _text_of(content: Any) -> Any:
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


def _role_of(role: Any) -> Any:
    if role == "developer":
        return "system"
    if role in ("tool", "function"):
        raise ValueError(f"tools are not supported, so a message cannot have the role {role!r}: remove it")
    return role


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _unsigned(seed: Any) -> Any:
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        return None if seed == -1 else seed % 2**53
    return seed


def _all_as_zero(top_k: Any) -> Any:
    return 0 if top_k == -1 else top_k


class ChatMessage(Wire):
    """One message. `developer` is `system`; `content` is text or a list of text parts."""

    harmless: ClassVar[Collection[str]] = frozenset(
        "audio cache_control name provider_specific_fields reasoning reasoning_content reasoning_details refusal "  # noqa: SIM905
        "thinking_blocks".split()
    )
    """Clients send back the fields of a reply."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_role_of)]
    content: Annotated[str, BeforeValidator(_text_of)]

    @model_validator(mode="before")
    @classmethod
    def _without_calls(cls, given: Any) -> Any:
        if isinstance(given, dict) and (given.get("tool_calls") or given.get("function_call")):
            raise ValueError("tools are not supported, so a message cannot call one (tool_calls): remove it")
        if isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None:
            return {**given, "content": ""}  # a reply that has only thoughts
        return given


class WrittenMessage(ChatMessage):
    """A message that the model continues, with its tokens."""

    written: list[Annotated[tuple[Annotated[int, Field(ge=0)], list[int]], Field(strict=False)]] = []
    """As `Message.written`: the tokens of an assistant message that the model generated, by position in the text."""


class StreamOptions(Wire):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Title = Annotated[str, Field(min_length=1, max_length=500)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Wanted(Wire):
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

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: set stream, or remove it")
        return self


class TextsWanted(Wanted):
    """Fields of both routes of decoders."""

    n: Annotated[int, Field(ge=1)] = 1
    keep_stop: bool = False
    """As `Sampling.keep_stop`: the stop string is part of the text."""
    drawn: Annotated[int, Field(ge=0)] = 0
    """As `Sampling.drawn`: number of tokens of this text that were already drawn with the same seed."""
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """As `Sampling.thinking_tokens`: tokens of thinking, beside `max_tokens`, up to the server's limit."""
    return_token_ids: bool = False
    """Include the new tokens (`token_ids`), their logprobs (`token_logprobs`) and the finish reason (`finish`: stop,
    eos, length, ...) in each choice."""
    ignore_eos: bool = False
    purpose: Purpose = "generate"
    """For accounting: generate, evaluate or answer."""
    answer_trigger: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Decode a rationale, append this text, then decode the answer; `fastcot` shortens the rationale. The reply's
    `parts` separate rationale and answer."""
    answer_tokens: Annotated[int, Field(ge=1)] = 32
    """Maximum tokens of the answer after the trigger."""
    whole_rationale: bool = False
    """Decode the rationale to its end, also with `fastcot`."""
    steps: Annotated[list[Title], Field(max_length=100)] = []
    """Titles of independent steps, which `pdos` decodes in parallel."""
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=128)] = []
    """Score these continuations instead of decoding; after an answer trigger, instead of the answer. The reply's
    `choice_logprobs` has the logprob (`total`, nats) and the number of `tokens` of each."""
    close_choices: bool = False
    """Also score the end of the text after each choice, so that "1" is not scored as the beginning of "10"."""

    @property
    def draws(self) -> bool:
        """False if the prompt is only scored and nothing is decoded."""
        return self.max_tokens != 0 or bool(self.choices)

    @model_validator(mode="after")
    def _consistent(self) -> TextsWanted:
        if self.stream and self.choices:
            raise ValueError("scores of choices cannot be streamed: remove stream")
        if self.stream and (self.keep_stop or self.return_token_ids):
            raise ValueError("keep_stop and return_token_ids do not support streams: remove stream")
        for field in ("answer_tokens", "whole_rationale"):
            if field in self.model_fields_set and self.answer_trigger is None:
                raise ValueError(f"{field} needs an answer trigger: give answer_trigger too")
        return self


class ChatWanted(TextsWanted):
    """`POST /v1/chat/completions`. `max_tokens` defaults to the server's limit."""

    echo: ClassVar = False
    messages: Annotated[list[WrittenMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    """Return the logprobs of the new tokens, before temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    continue_final_message: bool | None = None
    """Accepted only as true for a last message of the assistant, which is always continued, and false for others."""
    add_generation_prompt: bool | None = None
    """Accepted only as the opposite of `continue_final_message`."""

    @property
    def new_tokens(self) -> int | None:
        """The requested maximum of new tokens."""
        return min((one for one in (self.max_tokens, self.max_completion_tokens) if one is not None), default=None)

    @property
    def alternatives(self) -> int | None:
        """Number of top logprobs per token; None if logprobs are not requested."""
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _valid_chat(self) -> ChatWanted:
        if self.max_tokens == 0:
            raise ValueError("max_tokens is 0: request at least one token")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        last = self.messages[-1].role
        for field, right in (("continue_final_message", "true"), ("add_generation_prompt", "false")):
            if getattr(self, field) is ((last == "assistant") != (right == "true")):
                raise ValueError(f"{field} is {right} for a last message of the assistant, and its role is {last}")
        return self


class TextWanted(TextsWanted):
    """`POST /v1/completions`. `max_tokens` defaults to 16, as in OpenAI's API.

    `echo` with `max_tokens` 0 and `logprobs` scores the tokens of the prompt and draws nothing.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text, token ids, or a list of either. Control tokens in text are plain text; ids are used unchanged."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Number of top logprobs per token, before temperature and filters."""

    @property
    def new_tokens(self) -> int | None:
        """The requested maximum of new tokens."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of top logprobs per token; None if logprobs are not requested."""
        return self.logprobs

    @model_validator(mode="after")
    def _valid_text(self) -> TextWanted:
        if not self.prompt:
            raise ValueError("the prompt is empty: give text or token ids")
        if self.max_tokens == 0 and not self.choices and not (self.echo and self.logprobs is not None and self.n == 1):
            raise ValueError(
                "max_tokens is 0: request at least one token, or score the prompt with echo, logprobs and n=1"
            )
        return self


@dataclass(frozen=True, slots=True)
class Asked:
    """The work of one HTTP request: one decoder request per prompt, all decoded by the same method."""

    wanted: ChatWanted | TextWanted
    decoder: str
    requests: tuple[Request, ...]
    """One per prompt; each has its own random seed if the client gave none."""
    client: str = ""
    """Who sent it; the gate is fair between clients."""

    @property
    def chat(self) -> bool:
        return isinstance(self.wanted, ChatWanted)


def asked(
    wanted: ChatWanted | TextWanted,
    decoder: str,
    limits: Limits,
    client: str = "",
    own: Mapping[str, float] | None = None,
) -> Asked:
    """Convert a body to decoder requests. `own` has the model's own temperature and filters.

    Raises ServingError, or pydantic's ValidationError if the body is invalid.
    """
    prompts = _prompts(wanted)
    samples = len(prompts) * wanted.n
    if samples > limits.max_samples:
        message = f"{samples} samples (prompts times n) exceed the limit of {limits.max_samples}: request fewer"
        raise ServingError(400, message, "n", "too_many_samples")
    _check_fields(wanted, decoder)
    check_tokens(wanted, limits, "max_tokens", "max_completion_tokens", "answer_tokens")
    tokens = wanted.new_tokens
    if tokens is None:
        tokens = limits.max_tokens if isinstance(wanted, ChatWanted) else min(_TEXT_TOKENS, limits.max_tokens)
    sampling = wanted.model_dump(include=Sampling.model_fields.keys() - {"max_tokens", "seed"})
    sampling |= {name: value for name, value in (own or {}).items() if name not in wanted.model_fields_set}
    sampling["thinking_tokens"] = min(wanted.thinking_tokens, limits.max_tokens)
    fields = wanted.model_dump(include=Request.model_fields.keys() - {"prompt"})
    fields["answer_tokens"] = min(wanted.answer_tokens, limits.max_tokens)
    requests = []
    for prompt in prompts:
        seed = secrets.randbits(53) if wanted.seed is None else wanted.seed
        drawn = Sampling(max_tokens=max(1, tokens), seed=seed, **sampling)
        requests.append(Request(prompt=prompt, sampling=drawn, **fields))
    return Asked(wanted, decoder, tuple(requests), client)


def _prompts(wanted: ChatWanted | TextWanted) -> list[str | tuple[int, ...] | tuple[Message, ...]]:
    if isinstance(wanted, ChatWanted):
        messages = [Message(**message.model_dump()) for message in wanted.messages]
        empty = len(messages) > 1 and messages[-1].role == "assistant" and not messages[-1].content.strip()
        return [tuple(messages[:-1] if empty else messages)]  # an empty text has no continuation
    prompt = wanted.prompt
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in several]


def check_tokens(wanted: Wanted, limits: Limits, *fields: str) -> None:
    """Raise ServingError if one of these fields is above the limit on the tokens of a text."""
    for field in fields:
        value = getattr(wanted, field, None) if field in wanted.model_fields_set else None
        if value is not None and value > limits.max_tokens:
            message = f"{field} is {value} and this server's limit is {limits.max_tokens}: request fewer"
            raise ServingError(400, message, field, "above_limit")


def _check_fields(wanted: ChatWanted | TextWanted, decoder: str) -> None:
    """Raise ServingError for fields that this decoder would ignore, and for logprobs that it cannot compute."""
    if wanted.steps and decoder != "pdos":
        model = f"{wanted.model.partition(':')[0]}:pdos"
        message = f"steps are only for pdos, and this request is for {decoder}: use the model {model}"
        raise ServingError(400, message, "steps")
    if wanted.echo:
        if wanted.choices or wanted.answer_trigger:
            message = "echo does not support choices or an answer trigger: remove it"
            raise ServingError(400, message, "echo")
        if wanted.stream:
            raise ServingError(400, "echo does not support streams: remove echo or stream", "echo")
    if wanted.alternatives is None:
        return
    for field in ("stream", "choices", "answer_trigger"):
        if getattr(wanted, field):
            message = f"logprobs do not support {field}: remove {field} or logprobs"
            raise ServingError(400, message, "logprobs")
    if decoder == "pdos":
        message = "logprobs do not support parallel steps, which do not attend to one another: remove logprobs"
        raise ServingError(400, message, "logprobs")
