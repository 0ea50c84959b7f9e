"""The interface between searches and decoders: Request and Sampling as input, Completion and Usage as output.

All are immutable values, independent of models, tokenizers and decoding methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import from_json

from tot.decoders.constraint import Constraint

Purpose = Literal["generate", "evaluate", "answer", "escalate"]
"""The purpose of a request. "escalate" generates with the larger model of a search that has two."""
FinishReason = Literal["stop", "eos", "length", "repetition", "budget", "cancelled"]
"""Why a text ended: a stop string, the model's end of text, the token limit, many repetitions of the same tokens, the
search's budget, or a cancellation."""


_CHOICES = ("auto", "none", "required")
Effort = Literal["auto", "off", "low", "medium", "high"]
EFFORTS = {"off": 0, "low": 1024, "medium": 4096, "high": 16384, "auto": 4096}
"""Maximum tokens of the thinking."""


def in_unicode(text: str) -> str:
    """Replace unpaired surrogates, which tokenizers and servers reject, with question marks."""
    return text.encode("utf-8", "replace").decode()


UnicodeText = Annotated[str, AfterValidator(in_unicode)]


def before_stop(text: str, stops: Iterable[str]) -> str:
    """Return a text up to the first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Function(_Value):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: UnicodeText = ""
    parameters: Mapping[str, JsonValue] = {}
    """The JSON schema of an object with the arguments; empty for a function without arguments."""

    @model_validator(mode="after")
    def _callable(self) -> Function:
        if self.name in _CHOICES:
            raise ValueError(f"a function is named {self.name!r}, which is a value of tool_choice: rename it")
        if self.parameters.get("type", "object") != "object":
            raise ValueError(f"the parameters of {self.name} are not the schema of an object: give type object")
        return self


def _distinct(tools: tuple[Function, ...]) -> tuple[Function, ...]:
    names = [tool.name for tool in tools]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise ValueError(f"two tools are named {twice}: rename one")
    return tools


class ToolCall(_Value):
    """A call of a function by the model."""

    name: str
    arguments: UnicodeText
    """JSON text. The token limit may cut it."""
    id: str = ""
    """The name of the call in the conversation."""

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"

    def check(self) -> None:
        """Raise ValueError if the arguments are not a JSON object."""
        try:
            if isinstance(from_json(self.arguments, allow_inf_nan=False), dict):
                return
        except ValueError:
            pass
        given = f"the arguments of {self.name[:64]!r} are not a JSON object ({self.arguments[:60]!r})"
        raise ValueError(f"{given}: correct them, or leave the call out")


class Message(_Value):
    """One chat message. A final assistant message is a prefix that the model continues exactly, trailing whitespace
    included. A message with the role "tool" is the result of a call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: UnicodeText
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in an assistant's message, after its content."""
    tool_call_id: str = ""
    """The call of which this is the result."""
    reasoning_content: UnicodeText = ""
    """The thinking before an earlier reply, for chat templates that read it."""
    written: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The parts of such a prefix that the model generated: (offset in `content`, sampled tokens). A local model gets
    these tokens, as far as they match `content`, instead of the tokenized text."""

    @model_validator(mode="after")
    def _readable(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to messages of the assistant, not of the role {self.role!r}")
        for call in self.tool_calls:
            call.check()
        return self


class ThinkingOptions(_Value):
    """How a model thinks before its answer. Models that do not think ignore it.

    `settle` and `waits` have no effect on requests with an answer trigger or steps, and on pieces of a message
    (`keep_stop`).
    """

    budget: Effort | Annotated[int, Field(ge=0)] = "auto"
    """Maximum tokens of the thinking, beside `max_tokens`; longer thinking is closed, and the answer follows. "off",
    "low", "medium" and "high" are 0, 1,024, 4,096 and 16,384, and "auto" 4,096. All but "auto" also set the switch of
    the model's chat template."""
    counted: bool = False
    """Count thinking towards `max_tokens`, of which the answer keeps half, or 256."""
    settle: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Close thinking once two consecutive tries of its answer agree, each with at least this probability per token (see
    `tot.decoders.methods.thinking`). 0 never closes it early."""
    waits: Annotated[int, Field(ge=0, le=16)] = 0
    """How often to continue thinking that the model ends within its budget, with the word "Wait" (s1, arXiv
    2501.19393, section 3.1)."""
    hint: UnicodeText = ""
    """The beginning of the answer after thinking that was closed, such as "**Final answer:**"."""

    @property
    def tokens(self) -> int:
        """Maximum tokens of the thinking."""
        return EFFORTS[self.budget] if isinstance(self.budget, str) else self.budget


def _number(text: str) -> str | int:
    return int(text) if text.strip().isdecimal() else text.strip()


def _thinking_options(given: Any) -> Any:
    """Read a budget alone, or text such as "512,settle=0.9"."""
    if isinstance(given, str):
        parts = [part.partition("=") for part in given.split(",")]
        return {
            name.strip() if equals else "budget": value if equals else _number(name) for name, equals, value in parts
        }
    return {"budget": given} if isinstance(given, int) and not isinstance(given, bool) else given


Thinking = Annotated[ThinkingOptions, BeforeValidator(_thinking_options)]


class Sampling(_Value):
    """Sampling parameters. The temperature is applied first, then `top_k`, `top_p` and `min_p`.

    Token t of sample j is `argmax(filtered logits / temperature + G)`, where G is Gumbel noise that depends only on
    (seed, j, t, token id). The same request gets the same tokens in any batch.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 128
    thinking: Thinking = ThinkingOptions()
    """How the model thinks before its answer. Also given as a budget only (512, "low"), or as text
    ("512,settle=0.9")."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens that holds this share of the probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end the text; they are not part of it. In thinking they have no effect."""
    keep_stop: bool = False
    """Include the stop string and the whitespace after it. The text ends at a token boundary, so that it can be
    continued exactly. The next token is sampled, too: if it is an end token, the finish reason is "eos". A stop string
    after nothing but whitespace is ignored. Thinking is a part of the text, and stop strings end it, too."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    n: Annotated[int, Field(ge=1)] = 1
    """Number of samples of the prompt, which they share."""
    ignore_eos: bool = False
    drawn: Annotated[int, Field(ge=0)] = 0
    """Number of tokens of the same text that were sampled before, with the same seed. Skips their noise, so that the
    first sample continues as if the text had not ended."""
    sample: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Number of the first sample, j in the noise above."""


_RESERVED = {"messages", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "tools"}
"""Variables of chat templates that are not options."""


def _options(given: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    if reserved := given.keys() & _RESERVED:
        raise ValueError(f"the template option {min(reserved)!r} is set by the decoder: leave it out")
    return given


TemplateOptions = Annotated[Mapping[str, JsonValue], AfterValidator(_options)]


class Request(_Value):
    """A request to a decoder.

    `prompt` is text (control tokens in it are plain text), chat messages, or token ids (used unchanged).
    """

    prompt: Annotated[UnicodeText | tuple[Message, ...] | tuple[int, ...], Field(union_mode="left_to_right")]
    sampling: Sampling = Sampling()
    purpose: Purpose = "generate"
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Score these continuations of the prompt (or of the trigger) instead of decoding."""
    close_choices: bool = False
    """Also score the end-of-turn token after each choice, to distinguish "1" from the beginning of "10"."""
    answer_trigger: str | None = None
    """Decode a rationale, then append this text, then decode the answer (or score the choices)."""
    answer_tokens: Annotated[int, Field(ge=1)] = 32
    """Maximum tokens of the answer after the trigger."""
    steps: tuple[str, ...] = ()
    """Titles of independent steps, which `pdos` decodes in parallel first. Other decoders ignore them: the prompt must
    ask for the steps."""
    template_options: TemplateOptions = {}
    """Variables of the model's chat template, such as `enable_thinking` or `reasoning_effort`."""
    whole_rationale: bool = False
    """Decode the whole rationale, even if the decoder could answer from a part of it."""
    constraint: Constraint | None = None
    """The texts that the answer may be: the text after the thinking, or after the answer trigger if there is one. A
    stop string or the token limit may cut it."""
    tools: Annotated[tuple[Function, ...], AfterValidator(_distinct)] = ()
    """Functions that the model may call, in a prompt of messages. The decoder's `read_calls` reads the calls in a text.
    With a constraint, which is a JSON schema, it is the form of an answer without calls."""
    tool_choice: str = "auto"
    """Whether the model calls a function: "auto", "required", or the name of the function that it calls."""
    parallel_tool_calls: bool = True
    """Whether one text may have several calls, if the model's form of calls allows it."""

    @model_validator(mode="after")
    def _consistent(self) -> Request:
        if not self.prompt:
            raise ValueError("the prompt is empty: give text, chat messages or token ids")
        if self.choices and self.answer_trigger is None and self.sampling.n != 1:
            raise ValueError(f"choices are scored once, so n must be 1, not {self.sampling.n}")
        if self.close_choices and not self.choices:
            raise ValueError("close_choices needs choices")
        if self.tools:
            names = [tool.name for tool in self.tools]
            if self.tool_choice not in ("auto", "required", *names):
                raise ValueError(
                    f"tool_choice is {self.tool_choice[:64]!r}: give auto, required or one of {', '.join(names)[:200]}"
                )
            if not isinstance(self.prompt[0], Message):
                raise ValueError("tools need a chat: give the prompt as messages")
            if self.constraint is not None and self.constraint.json_schema is None:
                raise ValueError(f"tools go with a constraint of the kind json_schema, not {self.constraint.kind}")
        if self.constraint is not None or self.tools:
            conflicts = {
                "choices": self.choices,
                "keep_stop": self.sampling.keep_stop,
                "ignore_eos": self.sampling.ignore_eos,
            }
            if conflict := next((name for name, given in conflicts.items() if given), None):
                raise ValueError(
                    f"{conflict} does not go with a constraint or tools, which say how the text ends: leave it out"
                )
        if self.answer_trigger == "":
            raise ValueError("the answer trigger is empty: leave it out, or give its text")
        if not all(title.strip() for title in self.steps):
            raise ValueError(f"step {[bool(title.strip()) for title in self.steps].index(False) + 1} has no title")
        if self.steps and self.choices and self.answer_trigger is None:
            raise ValueError("steps are decoded and choices alone are only scored: give an answer_trigger between them")
        return self


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used. Only the first of a request's n samples includes the prompt tokens, so that sums are correct.

    `seconds` is the time from submission to the end, so sums of it are request-seconds, not elapsed time.
    """

    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were in the cache."""
    new_tokens: int = 0
    forwards: int = 0
    """Forward passes that this completion was part of, shared with other requests in the batch."""
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    approximate_tokens: int = 0
    """Tokens of rationales that were guessed and never verified."""
    undecoded_tokens: int = 0
    """Unused tokens of rationales that were cut short."""
    reached: int = 0
    """Draft positions with candidates at which all earlier positions were accepted."""
    forced_tokens: int = 0
    """New tokens for which a constraint left no choice. They join the forward pass of the next token."""
    masked_tokens: int = 0
    """New tokens that were drawn from the tokens that a constraint allows."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted divided by reached, as in papers on speculative decoding; None if nothing was drafted."""
        return self.accepted / self.reached if self.reached else None

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Usage)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, item.name) - getattr(other, item.name) for item in fields(Usage)))


@dataclass(frozen=True, slots=True)
class ChoiceLogprob:
    """Log-probability (nats) of one choice as a continuation."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-probability per token, to compare choices of different lengths."""
        return self.total / self.tokens


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a completion's text and its origin.

    "approximate" was guessed, not verified. "undecoded" has no text: `tokens` counts the unused tokens of the
    rationale. "step" was decoded in parallel with other steps, and begins with its title. "thinking" is the model's
    reasoning before its answer, and "closing" ends thinking that spent its tokens: neither is a part of the
    completion's text, except with `keep_stop`.
    """

    kind: Literal["exact", "trigger", "approximate", "undecoded", "step", "thinking", "closing"]
    text: str
    tokens: int = 0


_JOINED = ("text", "tokens", "logprob", "usage", "parts", "logprobs")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one request."""

    text: str
    tokens: tuple[int, ...]
    """The sampled tokens, including an end-of-text token, without the trigger's tokens and given titles of steps. The
    tokens of a skeleton of steps come first, then each step's tokens, including its closing marker."""
    logprob: float
    """Sum of the model's log-probabilities (nats; before the mask of a constraint, temperature and filters) of
    `tokens`. Tokens for which a constraint leaves no choice count 0."""
    finish_reason: FinishReason
    usage: Usage
    choice_logprobs: tuple[ChoiceLogprob, ...] = ()
    parts: tuple[Part, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probability of each sampled token, from a local model or a server that returns them."""
    trajectory: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For each step, if the decoder records it: (position, guesses for the tokens from there). `jacobi` records the
    guesses that a step verified, `fastcot` the remaining ones. Steps of an answer after a trigger are left out."""

    def then(self, more: Completion) -> Completion:
        """Concatenate this completion and its continuation `more`."""
        return replace(more, **{name: getattr(self, name) + getattr(more, name) for name in _JOINED})

    @property
    def thinking(self) -> str:
        """The model's reasoning before its answer, without tags."""
        return "".join(part.text for part in self.parts if part.kind == "thinking")

    @property
    def lacks_answer(self) -> bool:
        """Whether the text ended during or right after the thinking."""
        kinds = {part.kind for part in self.parts if part.kind == "thinking" or part.text.strip()}
        return kinds - {"closing"} == {"thinking"}

    @property
    def text_tokens(self) -> slice:
        """The tokens of `text` in `tokens` and `logprobs`, without the tokens of the thinking."""
        return slice(sum(part.tokens for part in self.parts if part.kind == "thinking"), None)

    @property
    def answer(self) -> str:
        """The text after the answer trigger, or the whole text without a trigger."""
        return self.parts[-1].text if any(part.kind == "trigger" for part in self.parts) else self.text
