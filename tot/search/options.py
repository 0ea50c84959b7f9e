"""The keywords of `solve`, for editors and type checkers: the fields of `SearchConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tot.decoders.budget import Budget
from tot.decoders.decoder import Decoder
from tot.decoders.models.model_names import Quantize
from tot.evaluators.base import Evaluator
from tot.generators.base import Generator
from tot.search.base import Search

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SearchOptions(TypedDict, total=False):
    """How to search, as described by `SearchConfig`."""

    model: str | Path | PreTrainedModel | Callable[[str], Any] | Mapping[str, Any] | None
    escalate: str | Path | PreTrainedModel | None
    decoder: str | Decoder | Mapping[str, Any]
    model_options: Mapping[str, Any]
    dtype: Literal["auto", "bf16", "fp32"]
    quantize: Quantize
    device: str
    kv_budget: int | str | None
    threads: int | None
    prefix_cache: bool
    search: str | Search | None
    generator: str | Generator | None
    evaluator: str | Evaluator | None
    tools: Sequence[Any]
    prompts: Literal["papers", "chat"] | None
    thoughts: int | None
    breadth: int | None
    depth: int | None
    until: float | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    certainty: str | None
    seed: int
    budget: Budget | Mapping[str, float] | None
    reproducible: bool
    budget_tokens: int
    budget_forwards: int
    budget_seconds: float
    budget_nodes: int
    tokenizer: Any
