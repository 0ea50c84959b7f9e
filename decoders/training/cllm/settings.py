"""Options of the training commands and functions. Importing this module does not import torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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
    seed: int = Field(0, ge=0, description="Seed of the run.")
