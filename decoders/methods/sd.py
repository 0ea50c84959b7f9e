"""sd and mcsd: speculative decoding with a chain, or with a tree of candidates."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tot.decoders.drafting.draft_model import make_drafter
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.methods.speculative import SpeculativeConfig, speculate

KConfig = Annotated[
    tuple[Annotated[int, Field(ge=1, le=64)], ...],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]


class DraftingOptions(MethodOptions):
    """Options of methods with a drafter."""

    draft: Any = None
    """None uses prompt lookup, which drafts a single chain; otherwise a draft model: a name, a hub id, a folder or a
    GGUF file."""


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


def _open(engine: Engine, options: SDOptions | MCSDOptions, stack: ExitStack) -> OpenedMethod:
    k_config = options.k_config if isinstance(options, MCSDOptions) else (1,) * options.k
    return speculate(engine, make_drafter(options.draft, engine, stack), SpeculativeConfig(k_config, options.rule))


SD = Method(_open, SDOptions)
MCSD = Method(_open, MCSDOptions)
