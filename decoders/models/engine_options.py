"""EngineOptions: how an engine computes a model: number format, quantization, device, cache and threads."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tot.decoders.errors import OptionError, unknown
from tot.decoders.machine import MAX_THREADS

Quantize = Literal["auto", "none", "gguf"]
"""Quantization of linear layers.

- "none": the model's weights.
- "gguf": the integers of a .gguf file, in four to eight bits.
- "auto": "gguf" for a .gguf file without an explicit dtype, if it is supported; otherwise, and for the embedded model,
  "none".

"gguf" needs the backend in C, and also quantizes the inputs of linear layers to eight bits, but no file of floats."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def _dtype(given: Any) -> str:
    """Return the short name of a dtype. Raises OptionError if it is unknown."""
    name = str(given).removeprefix("torch.")
    return _known("dtype", _DTYPES.get(name, name), ("auto", "bf16", "fp32"))


def _known(kind: str, name: str, choices: tuple[str, ...]) -> str:
    if name not in choices:
        raise OptionError(unknown(kind, name, choices))
    return name


def _pair(given: Any) -> Any:
    """Return two tags as a pair. Raises ValueError for other numbers, equal ones and empty ones."""
    tags = tuple(tag.strip() for tag in (given.split(",") if isinstance(given, str) else given or ()))
    if given is not None and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
        raise ValueError("give the tags that open and close the thinking: <a>,</a>")
    return tags or None


class EngineOptions(BaseModel):
    """How an engine computes a model."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    dtype: Annotated[Literal["auto", "bf16", "fp32"], BeforeValidator(_dtype)] = Field(
        "auto", description="auto: bf16 if the machine supports it."
    )
    quantize: Annotated[Quantize, BeforeValidator(lambda one: _known("quantization", str(one), get_args(Quantize)))] = (
        Field(
            "auto",
            description="gguf: 4- to 8-bit weights, as stored in a .gguf file, and inputs rounded to 8 bits, on a CPU. "
            "none: floating point. auto: gguf for a .gguf file, unless a dtype is given.",
        )
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    kv_budget: str | None = Field(None, description="Size of the key-value cache, in tokens or bytes (1.5GiB).")
    threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Number of threads on the CPU; by default all processors that the process may use, at most "
        "OMP_NUM_THREADS.",
    )
    prefix_cache: bool = Field(
        True,
        description="Keep computed prompts in the cache folder, so that later runs start sooner.",
    )
    think_tags: Annotated[tuple[str, str] | None, BeforeValidator(_pair)] = Field(
        None,
        description="The tags around the model's thinking, as <a>,</a>, if its chat template does not show them.",
        json_schema_extra={"text": True},
    )
