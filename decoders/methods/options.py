"""The options of the decoding methods. They are validated before a model or torch is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

KConfig = Annotated[
    tuple[Annotated[int, Field(ge=1, le=64)], ...],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]
LONGEST = 16
"""Maximum number of tokens in a draft of `auto`, and the size of its Jacobi window."""
Mark = Annotated[str, Field(min_length=1, max_length=40)]


class MethodOptions(BaseModel):
    """Autoregressive decoding: one token a step for every branch, all branches in one forward pass. No options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AutoOptions(MethodOptions):
    """Whatever pays by the measured costs: prompt lookup, a Jacobi window, a draft model, or plain decoding."""

    draft: Any = None
    """A draft model, used for texts where it is best: a name, a hub id, a folder or a GGUF file."""


class DraftingOptions(MethodOptions):
    """Options of methods with a drafter."""

    draft: Any = None
    """None uses prompt lookup, which drafts a single chain; otherwise a draft model: a name, a hub id, a folder or a
    GGUF file. Several names with commas: each drafts for the texts without a draft so far."""


class SDOptions(DraftingOptions):
    """Speculative decoding (Leviathan et al., 2023): verify k drafted tokens in one forward pass."""

    k: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens drafted per step."""
    rule: Literal["coupled", "leviathan"] = "coupled"
    """coupled gives the output of `ar`, token for token; leviathan keeps only its distribution."""


class MCSDOptions(DraftingOptions):
    """Multi-candidate speculative decoding (Yang et al., 2024): verify a tree of drafted tokens."""

    k_config: KConfig = (2, 2, 1)
    """Number of candidates at each drafted position, per candidate of the position before."""
    rule: Literal["coupled", "mcsd"] = "coupled"
    """coupled gives the output of `ar`, token for token; mcsd, recursive rejection, keeps only its distribution."""


class SEEDOptions(DraftingOptions):
    """SEED, scheduled speculation (arXiv 2406.18200): draft only what pays, or the paper's queue of drafts."""

    policy: Literal["packed", "rounds"] = "packed"
    """packed verifies all finished drafts in one forward; rounds verifies one after another while others draft."""
    overlap: bool | None = None
    """For rounds: draft in a second thread while the target verifies (True), or in between (False). None measures which
    is faster, because the target may need all cores."""
    adapt: bool = True
    """Adapt drafts to the measured latency and acceptance. False always drafts all of k_config."""
    k_config: KConfig = (2, 1, 1, 1, 1, 1)
    """Maximum number of candidates at each drafted position."""
    rule: Literal["coupled", "leviathan", "mcsd"] = "coupled"
    """coupled gives the output of `ar`, token for token; the rejection rules keep only its distribution."""

    @model_validator(mode="after")
    def _fitting(self) -> SEEDOptions:
        if self.rule == "leviathan" and max(self.k_config) > 1:
            raise ValueError("rule leviathan takes one candidate per position: give k_config=1,1,1, or rule=mcsd")
        if self.policy == "packed" and self.overlap is not None:
            raise ValueError("overlap is for policy=rounds: leave it out")
        return self


class JacobiOptions(MethodOptions):
    """Jacobi decoding (Santilli et al., 2023): correct n guessed tokens at once. Fast with a consistency LLM."""

    n: Annotated[int, Field(ge=1, le=128)] = 16
    """Tokens of a window."""
    adapt: bool = True
    """Feed only the part of a window that pays, by the measured latency and acceptance."""
    trajectory: bool = False
    """Keep the guesses of every step in `Completion.trajectory`."""


class LookaheadOptions(MethodOptions):
    """Lookahead decoding (Fu et al., 2024): n-grams of earlier guesses as drafts."""

    window: Annotated[int, Field(ge=1, le=64)] = 8
    """W: columns iterated beside each text."""
    ngram: Annotated[int, Field(ge=2, le=16)] = 4
    """N: tokens of an n-gram; a draft holds N - 1 of them."""
    guesses: Annotated[int, Field(ge=1, le=64)] = 8
    """G: n-grams verified per step."""
    adapt: bool = True
    """Iterate windows and verify n-grams only if that pays, by the measured latency and acceptance."""


class FastCoTOptions(MethodOptions):
    """FastCoT (arXiv 2311.08263): answer from the beginning of a rationale and an approximation of its rest."""

    cap: Annotated[int, Field(ge=0)] | None = None
    """Iterations after which a rationale is cut. 0 decodes the answer at once; None decodes rationales to their end.
    `tot fastcot calibrate` finds a cap that costs little accuracy with a window."""
    window: Annotated[int, Field(ge=0, le=128)] = 2
    """c, the context window. On CPUs, each row costs more than it saves: 0 was fastest."""
    glimpse: bool = True
    """Put the approximate tokens before the answer. False is the paper's baseline, which only cuts the rationale."""

    trajectory: bool = False
    """Keep (number of exact tokens, approximate tokens after them) of every iteration in `Completion.trajectory`."""


class PDOSOptions(MethodOptions):
    """PDOS: write independent steps in parallel, after a skeleton of titles. The markers are a variant of the paper."""

    marker: Mark = "####"
    """Begins a step."""
    terminator: Mark = "%%%"
    """Ends the block, after a marker and in place of a title. It may include the marker."""
    colon: Mark = ":"
    """Ends a title."""
    ellipsis: Mark = "..."
    """Stands for the rest of a step in a skeleton."""
    instructions: str | None = None
    """Instructions put before a text prompt, or after the last user message of a chat. None uses the built-in ones, ""
    adds none. A prompt of token ids is not changed."""
    max_steps: Annotated[int, Field(ge=1)] = 100
    """Maximum number of titles in a skeleton."""
    title_tokens: Annotated[int, Field(ge=1)] = 64
    """Maximum number of tokens of a title that the model writes."""
    step_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of a step. None divides max_tokens equally among the steps and the text after them."""

    @field_validator("marker", "terminator", "colon", mode="after")
    @classmethod
    def _on_one_line(cls, mark: str) -> str:
        if mark != mark.strip() or "\n" in mark:
            raise ValueError(f"{mark!r} has a line break, or white space at its start or end: remove it")
        return mark

    @model_validator(mode="after")
    def _distinct(self) -> PDOSOptions:
        terminator = self.terminator.removeprefix(self.marker)
        if not terminator:
            raise ValueError(f"the terminator equals the marker, {self.marker!r}: give another, such as '%%%'")
        marks = {"marker": self.marker, "terminator": terminator, "colon": self.colon}
        for name, mark in marks.items():
            for other, text in marks.items():
                if name != other and mark in text:
                    raise ValueError(f"the {name}, {mark!r}, is part of the {other}, {text!r}: choose another")
        return self
