"""Request bodies of the API: OpenAI's supported fields and additional ones.

An unsupported field that would change the result is rejected by name. With null or its neutral value (`"tools": []`,
`"frequency_penalty": 0`) it is ignored, as are fields without effect (`user`, `metadata`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tot.decoders.constraint import Constraint
from tot.decoders.request import Function, Message, TemplateOptions, Thinking, ThinkingOptions, ToolCall
from tot.decoders.serving.errors import invalid
from tot.decoders.serving.tool_fields import Form, called, choice, functions

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Body(BaseModel):
    """A JSON object. Unknown fields are refused; null, ignored fields and neutral values are dropped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ignored: ClassVar[Collection[str]] = ()
    """Fields without effect."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values of unsupported fields that have no effect."""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if value is not None and name not in cls.ignored}
        return {name: value for name, value in kept.items() if value not in cls.neutral.get(name, ())}


def joined_text(content: Any) -> Any:
    """Return the content as text, joining a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"a part has type {str(kind)[:40]!r}, and only text is supported: remove it")
        if not isinstance(part.get("text"), str):
            raise ValueError('a text part must be {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in content)


def _known_role(role: Any) -> Any:
    if role == "function":
        raise ValueError("the role 'function' is not supported: use tools, and the role 'tool'")
    return "system" if role == "developer" else role


def _unsigned(seed: Any) -> Any:
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        return None if seed == -1 else seed % 2**53
    return seed


def _thinking(given: Any) -> Any:
    """Read the form of Anthropic's API, such as {"type": "enabled", "budget_tokens": 1024}."""
    if not isinstance(given, dict) or "type" not in given:
        return given
    kinds = {"enabled": given.get("budget_tokens", "medium"), "disabled": "off", "adaptive": "auto"}
    kind, rest = given["type"], {name: given[name] for name in given.keys() - {"type", "budget_tokens"}}
    if kind not in kinds or (kind != "enabled" and "budget_tokens" in given):
        raise ValueError('the type is "enabled", with budget_tokens, or "disabled" or "adaptive" alone')
    return {**rest, "budget": kinds[kind]}


class ChatMessage(Body):
    """One message. `developer` is `system`; `content` is text or a list of text parts. Clients send back the fields of
    a reply."""

    ignored: ClassVar[Collection[str]] = (
        *("annotations", "audio", "cache_control", "name", "provider_specific_fields"),
        *("reasoning_details", "refusal", "thinking_blocks"),
    )

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_known_role)]
    content: Annotated[str, BeforeValidator(joined_text)]
    tool_calls: Annotated[list[ToolCall], BeforeValidator(called)] = []
    tool_call_id: str = ""
    """The call of which a message with the role `tool` is the result."""
    reasoning_content: str = ""
    """Thinking, also as `reasoning`: a part of the prompt if the model's chat template keeps that of earlier turns."""
    written: list[Annotated[tuple[Annotated[int, Field(ge=0)], list[int]], Field(strict=False)]] = []
    """As `Message.written`: the tokens of an assistant message that the model generated, by position in the text."""

    @model_validator(mode="before")
    @classmethod
    def _of_reply(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        thinking = given.get("reasoning_content") or given.pop("reasoning", None)
        given = {**given, "reasoning": None, "reasoning_content": thinking if isinstance(thinking, str) else None}
        if given.get("role") == "assistant" and given.get("content") is None:
            given["content"] = ""  # a reply that has only thoughts
        return given


class StreamOptions(Body):
    ignored: ClassVar[Collection[str]] = ("include_obfuscation",)

    include_usage: bool = False
    """Whether the last chunk of the stream has the usage."""


class SearchLimits(Body):
    """The field `x_tot`: limits of a search that OpenAI's API does not have."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """As `SearchConfig.until`: stop the search auto when the answer is this sure."""


class GenerationBody(Body):
    """Fields of all routes. Temperature and filters default to the model's own, otherwise to OpenAI's defaults.

    Without `seed`, each request gets a random one below 2**53, which the reply reports (`tot.seed`).
    """

    ignored: ClassVar[Collection[str]] = (
        *("cache_prompt", "client_metadata", "metadata", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "user", "verbosity"),
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("functions", "stop_token_ids"), ([],)),
        **dict.fromkeys(("frequency_penalty", "min_tokens", "presence_penalty"), (0,)),
        **dict.fromkeys(("best_of", "length_penalty", "n", "repeat_penalty", "repetition_penalty", "typical_p"), (1,)),
        **dict.fromkeys(("early_stopping", "echo", "include_stop_str_in_output", "use_beam_search"), (False,)),
        **dict.fromkeys(("include_reasoning", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
        "store": (True, False),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "suffix": ("",),
    }

    model: str
    """The served model, `model:decoder` to select another decoding method, or `model:search`."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, BeforeValidator(lambda top_k: 0 if top_k == -1 else top_k), Field(ge=0)] = 0
    """0 or -1 keeps all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**64)] | None, BeforeValidator(_unsigned)] = None
    """None or -1: a random seed."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
        Field(max_length=16),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    reasoning_effort: Effort | None = None
    """A name of a budget of the thinking; for a search a limit on all of its texts."""
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    """Maximum tokens of the thinking."""
    thinking: Annotated[Thinking, BeforeValidator(_thinking)] = ThinkingOptions()
    """As `Sampling.thinking`, or in the form of Anthropic's API."""

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort

    form_field: ClassVar = ""
    """The name of the field with the format of the reply."""

    @property
    def form(self) -> Constraint | None:
        """The format of the reply."""
        return None


class DecodingFields(Body):
    """Fields that only decoding methods support, with the meaning that they have in `Sampling` and `Request`."""

    n: Annotated[int, Field(ge=1)] = 1
    keep_stop: bool = False
    ignore_eos: bool = False
    drawn: Annotated[int, Field(ge=0)] = 0
    choices: Annotated[list[str], Field(max_length=128)] = []
    """The reply's `choice_logprobs` has the logprob (`total`, nats) and the number of `tokens` of each choice."""
    close_choices: bool = False
    constraint: Constraint | None = None
    return_token_ids: bool = False
    """Include the new tokens (`token_ids`), their logprobs (`token_logprobs`) and the finish reason (`finish`: stop,
    eos, length, ...) in each choice."""


class Conversation(GenerationBody):
    """A body with messages, for a decoding method or a search."""

    echo: ClassVar = False

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: TemplateOptions = {}
    """Variables of the model's chat template."""
    tools: Annotated[list[Function], BeforeValidator(functions)] = []
    """Functions that the model may call. Schemas are always enforced, so `strict` has no effect."""
    tool_choice: Annotated[str, BeforeValidator(choice)] = "auto"
    parallel_tool_calls: bool = True
    x_tot: SearchLimits = SearchLimits()

    @model_validator(mode="after")
    def _consistent_tools(self) -> Self:
        if self.tool_choice not in ("none", "auto", *(["required"] if self.tools else [])):
            names = [tool.name for tool in self.tools]
            if self.tool_choice not in names:
                given = f"tool_choice is {self.tool_choice[:64]!r}"
                raise invalid(f"{given}, and the tools are {', '.join(names) or 'missing'}", "tool_choice")
        calls: set[str] = set()
        for i, message in enumerate(self.messages):
            calls |= {call.id for call in message.tool_calls}
            if message.role == "tool" and message.tool_call_id not in calls:
                text = f"no call before this result has the id {message.tool_call_id[:64]!r}: remove the result"
                raise invalid(text, f"{self.place}.{i}.tool_call_id")
            if message.tool_calls and message.role != "assistant":
                raise invalid("only the assistant has tool_calls: remove them", f"{self.place}.{i}.tool_calls")
        if self.messages[-1].tool_calls:
            raise invalid("the last message has calls without results: add them, with the role tool", self.place)
        return self

    place: ClassVar = "messages"
    """The name of the field with the messages."""

    @property
    def history(self) -> list[Message]:
        """All messages."""
        return [Message(**message.model_dump()) for message in self.messages]

    @property
    def prompts(self) -> list[Any]:
        history = self.history
        empty = len(history) > 1 and history[-1].role == "assistant" and not history[-1].content.strip()
        return [tuple(history[:-1] if empty else history)]  # an empty text has no continuation


class ChatBody(Conversation, DecodingFields):
    """`POST /v1/chat/completions`."""

    form_field: ClassVar = "response_format"
    response_format: Form = None

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    """Return the logprobs of the new tokens, before temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    continue_final_message: bool | None = None
    """Accepted only as true for a last message of the assistant, which is always continued, and false for others."""
    add_generation_prompt: bool | None = None
    """Accepted only as the opposite of `continue_final_message`."""

    @property
    def form(self) -> Constraint | None:
        return self.response_format

    @property
    def alternatives(self) -> int | None:
        """Number of top logprobs per token; None if logprobs are not requested."""
        return self.top_logprobs if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Maximum new tokens of the whole reply."""
        return self.max_completion_tokens

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        last = self.messages[-1].role
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs", "top_logprobs")
        continues = last == "assistant"
        for field, right in (("continue_final_message", continues), ("add_generation_prompt", not continues)):
            if getattr(self, field) not in (None, right):
                raise invalid(f"{field} is {str(right).lower()} for a last message of the {last}", field)
        return self


class TextBody(GenerationBody, DecodingFields):
    """`POST /v1/completions`. `echo` with `max_tokens` 0 and `logprobs` scores the tokens of the prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.neutral,
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    }

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt: str | list[int] | list[str] | list[list[int]]
    """Text, token ids, or a list of either. Control tokens in text are plain text; ids are used unchanged."""
    echo: bool = False
    alternatives: Annotated[int, Field(ge=0, le=20)] | None = Field(None, validation_alias="logprobs")
    """Number of top logprobs per token, before temperature and filters."""

    @property
    def prompts(self) -> list[Any]:
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        prompts: Any = self.prompt if several else [self.prompt]
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]

    @property
    def most_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else None  # OpenAI's default
