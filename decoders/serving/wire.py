"""What a client may send, OpenAI's fields that can be honoured and ours; and that as requests to a decoder, by `asked`.

A field that would change the result and can't be honoured is refused by name; with its neutral value (`"tools": []`,
`"frequency_penalty": 0`) or null it is as if left out. Fields that change nothing (`user`, `metadata`) are dropped.
What only a tokenizer can tell (lengths) is checked where requests are submitted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tot.decoders.request import Message, Purpose, Request, Sampling
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits

_HARMLESS = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Values of fields that can't be honoured with which there is nothing to honour."""
_TEXT_TOKENS = 16
"""What a text completion gets that doesn't say how many tokens, as OpenAI's."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None and not _says_nothing(name, value)}


def _says_nothing(name: str, value: Any) -> bool:
    return name in _HARMLESS or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL.get(name, ())
    )


def _text_of(content: Any) -> Any:
    """Text, or the texts of a list of text parts, joined."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise ValueError(f"a part is of type {str(kind)[:40]!r}, and only text can be read: leave it out")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part is {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in content)


def _role_of(role: Any) -> Any:
    if role == "developer":
        return "system"
    if role in ("tool", "function"):
        raise ValueError(f"there are no tools here, so a message can't be from one ({role!r}): leave it out")
    return role


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _unseeded(seed: Any) -> Any:
    return None if seed == -1 and not isinstance(seed, bool) else seed


def _all_as_zero(top_k: Any) -> Any:
    return 0 if top_k == -1 else top_k


class ChatMessage(_Wire):
    """One message. `developer` is `system`; `content` is text or a list of text parts."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_role_of)]
    content: Annotated[str, BeforeValidator(_text_of)]
    written: list[Annotated[tuple[Annotated[int, Field(ge=0)], list[int]], Field(strict=False)]] = []
    """As `Message.written`: of an assistant message to continue, the tokens that the model drew, by their place."""

    @model_validator(mode="before")
    @classmethod
    def _without_calls(cls, given: Any) -> Any:
        if isinstance(given, dict) and (given.get("tool_calls") or given.get("function_call")):
            raise ValueError("there are no tools here, so a message can't call one (tool_calls): leave it out")
        return given


class StreamOptions(_Wire):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Title = Annotated[str, Field(min_length=1, max_length=500)]


class Wanted(_Wire):
    """What both routes take. Without `temperature` it is 1, as OpenAI's; without `seed` each request gets its own,
    which the reply tells (`tot.seed`)."""

    model: str
    """The served model, or `model:decoder` to have it decoded by another method."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, BeforeValidator(_all_as_zero), Field(ge=0)] = 0
    """0 or -1 keeps all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**64)] | None, BeforeValidator(_unseeded)] = None
    """None or -1: one of its own."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]], BeforeValidator(_as_list), Field(max_length=16)
    ] = []
    keep_stop: bool = False
    """As `Sampling.keep_stop`: the stop string is part of the text."""
    drawn: Annotated[int, Field(ge=0)] = 0
    """As `Sampling.drawn`: how many tokens of the same text were drawn before, with the same seed."""
    return_token_ids: bool = False
    """Each choice has the tokens drawn (`token_ids`), their log-probabilities (`token_logprobs`) and why its text ended
    (`finish`: stop, eos, length, ...)."""
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    purpose: Purpose = "generate"
    """For accounting: generate, evaluate or answer."""
    answer_trigger: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Decode a rationale, then this text, then the answer: what `fastcot` shortens. The reply has both, and `parts`
    says which is which."""
    answer_tokens: Annotated[int, Field(ge=1)] = 32
    """Most tokens of the answer after the trigger."""
    whole_rationale: bool = False
    """Decode the rationale to its end, also with `fastcot`."""
    steps: Annotated[list[Title], Field(max_length=100)] = []
    """Titles of steps that don't depend on one another: what `pdos` decodes side by side."""
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=128)] = []
    """Score these continuations instead of decoding; after an answer trigger, in place of the answer. The reply's
    `choice_logprobs` has for each its log-probability (nats, `total`) and its `tokens`."""
    close_choices: bool = False
    """Score the end of the text after each choice too, so that "1" is not just the beginning of "10"."""

    @property
    def draws(self) -> bool:
        """False: the prompt is scored, nothing is decoded."""
        return self.max_tokens != 0 or bool(self.choices)

    @model_validator(mode="after")
    def _consistent(self) -> Wanted:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream, or leave it out")
        if self.stream and self.choices:
            raise ValueError("choices are scored, which is nothing to stream: leave stream out")
        if self.stream and (self.keep_stop or self.return_token_ids):
            raise ValueError("keep_stop and return_token_ids are for whole replies: leave stream out")
        for field in ("answer_tokens", "whole_rationale"):
            if field in self.model_fields_set and self.answer_trigger is None:
                raise ValueError(f"{field} is about the answer after a trigger: give answer_trigger too")
        return self


class ChatWanted(Wanted):
    """`POST /v1/chat/completions`. Without `max_tokens` it is the server's limit."""

    echo: ClassVar = False
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    """Log-probabilities of the tokens drawn, by the model alone: before temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    continue_final_message: bool = False
    """Go on with the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`: taken where it says so."""

    @property
    def new_tokens(self) -> int | None:
        """The most that are asked for."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """To each token, where log-probabilities are asked for."""
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _can_be_told_to_the_model(self) -> ChatWanted:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one of them")
        if self.max_tokens == 0:
            raise ValueError("max_tokens is 0: ask for one token at least")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        last = self.messages[-1].role
        if self.continue_final_message and last != "assistant":
            raise ValueError(f"continue_final_message is set, and the last message is of the {last}, not the assistant")
        if last == "assistant" and not self.continue_final_message:
            raise ValueError(
                "the last message is the assistant's: set continue_final_message to have it go on, or end with the user"
            )
        if self.add_generation_prompt is self.continue_final_message:
            raise ValueError("add_generation_prompt has to be the opposite of continue_final_message: leave it out")
        return self


class TextWanted(Wanted):
    """`POST /v1/completions`. Without `max_tokens` it is 16, as OpenAI's.

    `echo` with `max_tokens` 0 and `logprobs` scores the prompt: token by token, nothing drawn.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text, token ids, or a list of either: control tokens in texts are plain text, ids are taken as they are."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """How many alternatives to tell at each position, besides the token itself; by the model alone, as for chats."""

    @property
    def new_tokens(self) -> int | None:
        """The most that are asked for."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """To each token, where log-probabilities are asked for."""
        return self.logprobs

    @model_validator(mode="after")
    def _has_something_to_do(self) -> TextWanted:
        if not self.prompt:
            raise ValueError("the prompt is empty: give text or token ids")
        if self.max_tokens == 0 and not self.choices and not (self.echo and self.logprobs is not None and self.n == 1):
            raise ValueError(
                "max_tokens is 0: ask for one token at least, or score the prompt with echo, logprobs and n=1"
            )
        return self


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request's worth of work: a request a prompt, all of them decoded by one method."""

    wanted: ChatWanted | TextWanted
    decoder: str
    requests: tuple[Request, ...]
    """Where the client gave no seed, each has its own."""

    @property
    def chat(self) -> bool:
        return isinstance(self.wanted, ChatWanted)


def asked(wanted: ChatWanted | TextWanted, decoder: str, limits: Limits) -> Asked:
    """What is to be done. Raises ServingError or pydantic's ValidationError for what can't be."""
    prompts = _prompts(wanted)
    samples = len(prompts) * wanted.n
    if samples > limits.max_samples:
        said = f"{samples} texts at once (prompts times n) are over the limit of {limits.max_samples}: ask for fewer"
        raise ServingError(400, said, "n", "too_many_samples")
    _check_fields(wanted, decoder)
    _check_tokens(wanted, limits)
    tokens = wanted.new_tokens
    if tokens is None:
        tokens = limits.max_tokens if isinstance(wanted, ChatWanted) else min(_TEXT_TOKENS, limits.max_tokens)
    sampling = wanted.model_dump(include=Sampling.model_fields.keys() - {"max_tokens", "seed"})
    fields = wanted.model_dump(include=Request.model_fields.keys() - {"prompt"})
    fields["answer_tokens"] = min(wanted.answer_tokens, limits.max_tokens)
    requests = []
    for prompt in prompts:
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        drawn = Sampling(max_tokens=max(1, tokens), seed=seed, **sampling)
        requests.append(Request(prompt=prompt, sampling=drawn, **fields))
    return Asked(wanted, decoder, tuple(requests))


def _prompts(wanted: ChatWanted | TextWanted) -> list[str | tuple[int, ...] | tuple[Message, ...]]:
    if isinstance(wanted, ChatWanted):
        return [tuple(Message(**message.model_dump()) for message in wanted.messages)]
    prompt = wanted.prompt
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [one if isinstance(one, str) else tuple(one) for one in several]


def _check_tokens(wanted: ChatWanted | TextWanted, limits: Limits) -> None:
    for field in ("max_tokens", "max_completion_tokens", "answer_tokens"):
        given = getattr(wanted, field, None) if field in wanted.model_fields_set else None
        if given is not None and given > limits.max_tokens:
            said = f"{field} is {given} and this server's limit is {limits.max_tokens}: ask for less"
            raise ServingError(400, said, field, "above_limit")


def _check_fields(wanted: ChatWanted | TextWanted, decoder: str) -> None:
    """Fields of ours that this decoder would not honour, and log-probabilities that could not be told truly."""
    if wanted.steps and decoder != "pdos":
        named = f"{wanted.model.partition(':')[0]}:pdos"
        said = f"steps are what pdos decodes side by side, and this request goes to {decoder}: name the model {named}"
        raise ServingError(400, said, "steps")
    if wanted.echo:
        if wanted.choices or wanted.answer_trigger:
            said = "echo goes with plain texts, without choices or an answer trigger: leave it out"
            raise ServingError(400, said, "echo")
        if wanted.stream:
            raise ServingError(400, "echo is for whole replies: leave it or stream out", "echo")
    if wanted.alternatives is None:
        return
    for field in ("stream", "choices", "answer_trigger"):
        if getattr(wanted, field):
            said = f"logprobs are told of whole, plain texts only: leave out {field} or logprobs"
            raise ServingError(400, said, "logprobs")
    if decoder == "pdos":
        said = "logprobs can't be told of parallel steps, which have not seen one another: leave them out"
        raise ServingError(400, said, "logprobs")
