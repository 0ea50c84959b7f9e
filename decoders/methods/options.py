"""The options of the decoding methods, by name: what is wrong with them is said before a model is loaded, or torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

KConfig = Annotated[
    tuple[Annotated[int, Field(ge=1, le=64)], ...],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]
LONGEST = 16
"""Tokens of a draft of `auto`, at most; also of its Jacobi window."""
Mark = Annotated[str, Field(min_length=1, max_length=40)]


class MethodOptions(BaseModel):
    """For a method that has nothing to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AutoOptions(MethodOptions):
    """Options of `auto`."""

    draft: Any = None
    """A model that drafts where that promises most: a name, a hub id, a folder, a GGUF file or "early-exit:6"; None is
    the one that `tot train-draft` made for the target, where there is one."""


class DraftingOptions(MethodOptions):
    draft: Any = None
    """None looks tokens up in what was written so far, which gives a single chain; "early-exit:6" drafts with the
    target's first layers; else a draft model: a name, a hub id, a folder or a GGUF file. Several, with commas, each for
    texts that those before had nothing for."""


class SDOptions(DraftingOptions):
    """Options of `sd`."""

    k: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens drafted a step."""
    rule: Literal["coupled", "leviathan"] = "coupled"
    """coupled gives what `ar` gives, token for token; leviathan only its distribution."""


class MCSDOptions(DraftingOptions):
    """Options of `mcsd`."""

    k_config: KConfig = (2, 2, 1)
    """Candidates at each position drafted, after each candidate of the position before."""
    rule: Literal["coupled", "mcsd"] = "coupled"
    """coupled gives what `ar` gives, token for token; mcsd, recursive rejection, only its distribution."""


class SEEDOptions(DraftingOptions):
    """Options of `seed`."""

    policy: Literal["packed", "rounds"] = "packed"
    """packed verifies all finished drafts in one forward; rounds one after another, while others draft."""
    overlap: bool | None = None
    """rounds: draft in a thread of its own while the target verifies (True), or in between (False); None does what the
    clock says is faster, as the target may need all cores."""
    adapt: bool = True
    """Measure what forwards cost and drafts bring, and draft as much as pays; False drafts all of k_config, always."""
    k_config: KConfig = (2, 1, 1, 1, 1, 1)
    """Candidates at each position drafted, at most."""
    rule: Literal["coupled", "leviathan", "mcsd"] = "coupled"
    """coupled gives what `ar` gives, token for token; the others, rejection rules, only its distribution."""

    @model_validator(mode="after")
    def _fitting(self) -> SEEDOptions:
        if self.rule == "leviathan" and max(self.k_config) > 1:
            raise ValueError("rule leviathan knows one candidate a position: give k_config=1,1,1, or rule=mcsd")
        if self.policy == "packed" and self.overlap is not None:
            raise ValueError("overlap is for policy=rounds: leave it out")
        return self


class JacobiOptions(MethodOptions):
    """Options of `jacobi`."""

    n: Annotated[int, Field(ge=1, le=128)] = 16
    """Tokens of a window."""
    adapt: bool = True
    """Feed only as much of a window as pays, by the measured cost of rows and what was kept so far."""
    trajectory: bool = False
    """Keep what was guessed in every step: `Completion.trajectory`."""


class LookaheadOptions(MethodOptions):
    """Options of `lookahead`."""

    window: Annotated[int, Field(ge=1, le=64)] = 8
    """W: columns iterated beside each text."""
    ngram: Annotated[int, Field(ge=2, le=16)] = 4
    """N: tokens of an n-gram; N - 1 of them are drafted."""
    guesses: Annotated[int, Field(ge=1, le=64)] = 8
    """G: n-grams verified a step."""
    adapt: bool = True
    """Iterate windows and verify n-grams only where that pays, by the measured cost of rows and what was accepted."""


class FastCoTOptions(MethodOptions):
    """Options of `fastcot`."""

    cap: Annotated[int, Field(ge=0)] | None = None
    """Iterations after which a rationale is cut; 0 asks for the answer at once, None decodes rationales to their end.
    `tot fastcot calibrate` finds one that costs little accuracy with a window."""
    window: Annotated[int, Field(ge=0, le=128)] = 2
    """c, the context window: 2 is what paid on CPUs; a wider one is for machines where rows cost next to nothing."""
    glimpse: bool = True
    """Show the approximate tokens to the answer; False is the paper's baseline, a rationale that is only cut."""

    trajectory: bool = False
    """Keep (exact tokens so far, approximate tokens after them) of every iteration: `Completion.trajectory`."""


class PDOSOptions(MethodOptions):
    """Options of `pdos`. The defaults of the markers are one of the spellings in the paper."""

    marker: Mark = "####"
    """Begins a step."""
    terminator: Mark = "%%%"
    """After a marker, in place of a title: ends the block. May be given with the marker in front."""
    colon: Mark = ":"
    """Ends a title."""
    ellipsis: Mark = "..."
    """Stands for the rest of a step in a skeleton."""
    instructions: str | None = None
    """What a text prompt begins with and the last user message of a chat ends with; "" is nothing, None are our own
    words. A prompt of token ids is left as it is."""
    max_steps: Annotated[int, Field(ge=1)] = 100
    """A skeleton ends at so many titles."""
    title_tokens: Annotated[int, Field(ge=1)] = 64
    """Most tokens of a title that the model writes."""
    step_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of a step; None is its share of max_tokens, of which what follows the block has one too."""

    @field_validator("marker", "terminator", "colon", mode="after")
    @classmethod
    def _on_one_line(cls, given: str) -> str:
        if given != given.strip() or "\n" in given:
            raise ValueError(f"{given!r} has white space at an end or a line break: take it out")
        return given

    @model_validator(mode="after")
    def _distinct(self) -> PDOSOptions:
        terminator = self.terminator.removeprefix(self.marker)
        if not terminator:
            raise ValueError(f"the terminator is the marker, {self.marker!r}: give another, such as '%%%'")
        marks = {"marker": self.marker, "terminator": terminator, "colon": self.colon}
        for name, mark in marks.items():
            for other, text in marks.items():
                if name != other and mark in text:
                    raise ValueError(f"the {name}, {mark!r}, is part of the {other}, {text!r}: choose another")
        return self
