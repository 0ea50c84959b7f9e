"""The whole vocabulary between a search and a decoder: Request and Sampling go in, Completion and Usage come out.

All are immutable values. Nothing here knows a model, a tokenizer or a decoding method.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Purpose = Literal["generate", "evaluate", "answer"]
FinishReason = Literal["stop", "eos", "length", "budget", "cancelled"]


def in_unicode(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which no tokenizer or server takes."""
    return text.encode("utf-8", "replace").decode()


UnicodeText = Annotated[str, AfterValidator(in_unicode)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(_Value):
    """One chat message. An assistant message at the end is a prefix that the model goes on writing, from its very end
    on: blanks and newlines there count."""

    role: Literal["system", "user", "assistant"]
    content: UnicodeText
    written: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Of such a prefix, what the model wrote itself: (where it begins in `content`, the tokens drawn). A model that
    runs here is given those tokens as far as they spell `content`, whatever its tokenizer would make of the text."""


class Sampling(_Value):
    """How tokens are drawn: temperature first, then `top_k`, `top_p` and `min_p` on what it leaves.

    Token t of sample j is `argmax(filtered logits / temperature + G)`, G being Gumbel noise that depends on
    (seed, j, t, token id) alone: the same request gets the same tokens whatever it was packed with.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens that holds this share of the probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end the text; they are not part of it."""
    keep_stop: bool = False
    """The string that ends the text is part of it, with the blanks that follow, and the text ends between two tokens,
    so that it can be gone on from just as it was drawn. The token after it is drawn, too: where the model ends its
    text there, that is what ends it. A string that only blanks come before ends nothing."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    n: Annotated[int, Field(ge=1)] = 1
    """Samples drawn from one prompt, which they share."""
    ignore_eos: bool = False
    drawn: Annotated[int, Field(ge=0)] = 0
    """How many tokens of the same text were drawn before, with the same seed: their noise is used up, and the first
    sample goes on as if the text had never ended."""


class Request(_Value):
    """What a decoder is asked for.

    `prompt` is text (control tokens in it are plain text), chat messages, or token ids (taken as they are).
    """

    prompt: Annotated[UnicodeText | tuple[Message, ...] | tuple[int, ...], Field(union_mode="left_to_right")]
    sampling: Sampling = Sampling()
    purpose: Purpose = "generate"
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Score these continuations of the prompt (or of the trigger) instead of decoding."""
    close_choices: bool = False
    """Score the end-of-turn token after each choice too, so that "1" is not just the beginning of "10"."""
    answer_trigger: str | None = None
    """Decode a rationale, then append this text, then decode the answer (or score the choices)."""
    answer_tokens: Annotated[int, Field(ge=1)] = 32
    """Most tokens of the answer after the trigger."""
    steps: tuple[str, ...] = ()
    """Titles of steps that don't depend on one another: what `pdos` decodes side by side, before all else. Other
    decoders know of no steps: there the prompt has to ask for them."""
    states: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers whose hidden states come back with the completion, of a model that runs here. They are numbered as
    transformers' `output_hidden_states`: 0 is the embeddings, the last the model's output after its norm."""
    whole_rationale: bool = False
    """Decode the rationale to its end, also where the decoder would answer from a part of it."""

    @model_validator(mode="after")
    def _consistent(self) -> Request:
        if not self.prompt:
            raise ValueError("the prompt is empty: give text, chat messages or token ids")
        if self.choices and self.answer_trigger is None and self.sampling.n != 1:
            raise ValueError(f"choices are scored once, so n must be 1, not {self.sampling.n}")
        if self.close_choices and not self.choices:
            raise ValueError("close_choices needs choices")
        if self.answer_trigger == "":
            raise ValueError("the answer trigger is empty: leave it out, or give its text")
        if not all(title.strip() for title in self.steps):
            raise ValueError(f"step {[bool(title.strip()) for title in self.steps].index(False) + 1} has no title")
        if self.states and self.choices and self.answer_trigger is None:
            raise ValueError("states come with tokens that are drawn, and choices alone are only scored: leave one out")
        if self.steps and self.choices and self.answer_trigger is None:
            raise ValueError("steps are decoded and choices alone are only scored: give an answer_trigger between them")
        return self


@dataclass(frozen=True, slots=True)
class Usage:
    """What was spent. Of the n samples of a request the first carries the prompt, so that sums come out right.

    `seconds` is the time from submission to the end, so sums of it are request-seconds, not elapsed time.
    """

    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were there already."""
    new_tokens: int = 0
    forwards: int = 0
    """Forward passes that this took part in, each shared with whatever else was packed into it."""
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    approximate_tokens: int = 0
    """Tokens of rationales that were guessed and never verified."""
    undecoded_tokens: int = 0
    """Tokens that rationales which were cut had still room for."""
    cost: float = 0.0
    """What a remote server takes for it, by the prices given."""
    reached: int = 0
    """Positions of drafts that were reached: they had candidates, and all before them had been accepted."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over reached, as papers on speculative decoding have it; None where nothing was drafted."""
        return self.accepted / self.reached if self.reached else None

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Usage)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(Usage)))


@dataclass(frozen=True, slots=True)
class ChoiceLogprob:
    """Log-probability (nats) of one choice as a continuation."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-probability a token, for choices of different lengths."""
        return self.total / self.tokens


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a completion's text and where it came from.

    "approximate" was guessed, not verified; "undecoded" has no text: `tokens` is what the rationale still had room for.
    "step" was decoded beside other steps, and begins with its title. "thinking" is what a remote model thought before
    it wrote: it is no part of the completion's text.
    """

    kind: Literal["exact", "trigger", "approximate", "undecoded", "step", "thinking"]
    text: str
    tokens: int = 0


_JOINED = ("text", "tokens", "logprob", "usage", "parts", "logprobs")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one request."""

    text: str
    tokens: tuple[int, ...]
    """The tokens drawn, an end-of-text token among them; not the trigger's, nor titles of steps that were given. What
    was drawn for a skeleton of steps comes before them, then each step's tokens, its closing marker's among them."""
    logprob: float
    """Sum of the model's log-probabilities (nats; before temperature and filters) of `tokens`."""
    finish_reason: FinishReason
    usage: Usage
    choice_logprobs: tuple[ChoiceLogprob, ...] = ()
    parts: tuple[Part, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probabilities of each token drawn, from a model here or a server that gave them."""
    trajectory: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """By step, of a decoder that was asked to keep it: (position, the guesses for the tokens from there on). `jacobi`
    keeps what a step verified, `fastcot` what it left."""
    states: Any = field(default=None, compare=False)
    """(tokens, layers asked for, hidden) in float16, a tensor on the CPU: what each of `tokens` was drawn from. One row
    more where the token after the text was looked at; so the last row is of the text's own end where the model ended
    it, or `keep_stop` did."""

    def then(self, more: Completion) -> Completion:
        """This one and what goes on with it, as one."""
        joined: dict[str, Any] = {name: getattr(self, name) + getattr(more, name) for name in _JOINED}
        if self.states is not None and more.states is not None:
            from torch import cat  # there is one already where there are states

            joined["states"] = cat([self.states[: len(self.tokens)], more.states])
        return replace(more, **joined)

    @property
    def answer(self) -> str:
        """The text after the answer trigger; the whole text where there was none."""
        return self.parts[-1].text if any(part.kind == "trigger" for part in self.parts) else self.text
