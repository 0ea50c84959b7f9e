"""A decoding method: its options, and how to open it on an engine. A method is a file of its own with an entry point.

METHOD = Method(lambda engine, options, stack: OpenedMethod(MyPolicy))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from tot.decoders.request import Request

if TYPE_CHECKING:
    from tot.decoders.drafting.drafters import Drafter
    from tot.decoders.engine.engine import Engine
    from tot.decoders.engine.sequence import PolicyFactory
    from tot.decoders.methods.programs import Program, Sample


class MethodOptions(BaseModel):
    """Options of a decoding method, which are validated before a model is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenedMethod(NamedTuple):
    """A method on one engine."""

    policy: PolicyFactory
    """Decodes a request."""
    drafter: Drafter | None = None
    prepare: Callable[[Request], Request] | None = None
    """Changes a request before decoding, for example adds instructions to the prompt."""
    draft_rows: int = 0
    """Maximum number of drafted tokens that a sample holds in the cache at once."""
    program: Callable[[Sample], Program] | None = None
    """Decodes a sample of a request with an answer trigger as several requests, and may cut its rationale."""
    writes_steps: bool = False
    """Whether the program decodes all texts, with their steps in parallel."""
    counts: Counter[str] | None = None
    """Its statistics: the number of skeletons of parallel steps, and of skeletons that broke the format."""


class Method(NamedTuple):
    """A decoding method."""

    open: Callable[[Engine, Any, ExitStack], OpenedMethod]
    """Open the method on an engine, with options. The stack closes the state that its requests share."""
    options: type[BaseModel] = MethodOptions
    few_shot: bool = False
    """Whether it needs prompts that mark parallel steps, as few-shot prompts do."""
    needs_trigger: bool = False
    """Whether it decodes only requests with an answer trigger in its own way, and others as `ar`."""
