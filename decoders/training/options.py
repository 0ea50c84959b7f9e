"""Options of the training commands and functions. Importing this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tot.decoders.models.model_names import Quantize


def _listed(layers: object) -> object:
    return tuple(filter(None, layers.split(","))) if isinstance(layers, str) else layers


Layers = Annotated[tuple[int, ...], BeforeValidator(_listed)]


class DraftOptions(BaseModel):
    """Size and training of a draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(300_000, ge=1, description="Minimum number of tokens to record.")
    layers: Layers = Field(
        (),
        description="Layers of the target whose states it reads, comma-separated; the default is the layers after one "
        "third, two thirds and all of them.",
    )
    width: int = Field(512, ge=8, le=8192, description="Size of its vectors.")
    known: int = Field(8192, ge=1, description="Number of frequent tokens that it drafts.")
    steps: int = Field(4, ge=1, le=16, description="Tokens drafted one after another in training.")
    epochs: float = Field(4.0, gt=0, description="Training epochs.")
    batch: int = Field(256, ge=1)
    """Positions per step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate: a linear warmup over 5% of the steps, then a cosine decay to a tenth."""
    seed: int = Field(0, ge=0, description="Seed of the run.")


class CollectOptions(BaseModel):
    """Options for collecting the trajectories of a consistency LLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(16, ge=2, le=128, description="Tokens per window.")
    augment: float = Field(
        0.3, ge=0, le=1, description="Probability of correcting a wrong token, in a second copy of each point."
    )
    together: int = Field(16, ge=1)
    """Texts per batch and per shard."""
    seed: int = Field(0, ge=0, description="Seed of the corrections.")


class TrainOptions(BaseModel):
    """Options of consistency training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(1, ge=1, description="Training epochs.")
    learning_rate: float = Field(
        2e-5, gt=0, description="Peak learning rate: warmup over 5% of the steps, then decay to a tenth."
    )
    ar_weight: float = Field(10.0, ge=0, description="Weight of the AR loss (w); a lower weight changes answers more.")
    windows: int = Field(4, ge=1, description="Windows per text in one forward pass, sampled from its trajectory.")
    accumulate: int = Field(4, ge=1, description="Texts per step.")
    together: int = Field(4, ge=1, description="Texts per forward pass; more are faster and need more memory.")
    lora: int | None = Field(None, ge=1, description="Train only LoRA matrices, of this rank.")
    gradient_checkpointing: bool = Field(False, description="Use less memory and more time.")
    checkpoint_every: int = Field(200, ge=1)
    """Steps between checkpoints."""
    seed: int = Field(0, ge=0, description="Seed of the run.")


class ValueOptions(BaseModel):
    """Training data of a value head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(400, ge=10, description="Questions; one in five is held out for selection and calibration.")
    samples: int = Field(8, ge=2, description="Solutions per question, which share prefixes.")
    layers: Layers = Field(
        (), description="Layers whose states are tried, comma-separated; default: four in the upper half."
    )
    concurrency: int = Field(16, ge=1, description="Questions searched concurrently.")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="As for tot eval.")
    quantize: Quantize = Field("auto", description="As for tot eval.")
    seed: int = Field(0, ge=0, description="Seed of the run.")
