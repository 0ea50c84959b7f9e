"""A decoding method: how it is opened on an engine, and its options. Importing this imports no torch.

METHOD = Method(lambda engine, options, stack: OpenedMethod(MyPolicy))
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from tot.decoders.methods.options import MethodOptions
from tot.decoders.request import Request

if TYPE_CHECKING:
    from tot.decoders.drafting.drafters import Drafter
    from tot.decoders.engine.engine import Engine
    from tot.decoders.engine.sequence import PolicyFactory


class OpenedMethod(NamedTuple):
    """A method on one engine: the policy of each request, and the drafter."""

    policy: PolicyFactory
    drafter: Drafter | None = None
    prepare: Callable[[Request], Request] | None = None
    """Changes a request beforehand: adds instructions to the prompt, say."""
    writes_steps: bool = False
    """Whether the steps of a request are written side by side."""


class SpeculativeConfig(NamedTuple):
    """How much a speculative method drafts, and how that is verified."""

    k_config: tuple[int, ...]
    """Candidates at each position, after each candidate of the position before."""
    rule: str = "coupled"
    adapt: bool = False
    """Draft as much as pays, by what forwards take and what was accepted so far of requests with the same purpose."""
    probes: int = 0
    """Most rows of a draft's probes."""
    trajectory: bool = False
    """Keep what was drafted in every step: `Completion.trajectory`."""


class Method(NamedTuple):
    open: Callable[[Engine, Any, ExitStack], OpenedMethod]
    """On an engine, with options; the stack closes what its requests share."""
    options: type[BaseModel] = MethodOptions
    few_shot: bool = False
    """Whether it needs what few-shot prompts mark: rationales, parallel steps."""
