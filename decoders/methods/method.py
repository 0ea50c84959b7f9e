"""A decoding method: how to open it on an engine, and its options. Importing this module does not import torch.

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
    """A method on one engine: the policy factory for requests, and the drafter."""

    policy: PolicyFactory
    drafter: Drafter | None = None
    prepare: Callable[[Request], Request] | None = None
    """Changes a request before decoding, for example adds instructions to the prompt."""
    writes_steps: bool = False
    """Whether the steps of a request are decoded in parallel."""
    cuts_rationales: bool = False
    """Whether a rationale before an answer trigger may be cut."""


class SpeculativeConfig(NamedTuple):
    """How much a speculative method drafts, and how drafts are verified."""

    k_config: tuple[int, ...]
    """Number of candidates at each position, per candidate of the position before."""
    rule: str = "coupled"
    adapt: bool = False
    """Adapt drafts to the measured latency and to the acceptance so far of requests with the same purpose."""
    probes: int = 0
    """Maximum number of rows of a draft's probes."""
    trajectory: bool = False
    """Keep the draft of every step in `Completion.trajectory`."""


class Method(NamedTuple):
    """An entry of `PRESETS`."""

    open: Callable[[Engine, Any, ExitStack], OpenedMethod]
    """Open the method on an engine, with options. The stack closes the state that its requests share."""
    options: type[BaseModel] = MethodOptions
    few_shot: bool = False
    """Whether it needs prompts that mark parallel steps, as few-shot prompts do."""
