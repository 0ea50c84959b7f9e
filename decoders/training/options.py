"""How models are made here: what commands and functions of training take. Importing this imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tot.decoders.models.model_names import Quantize

HEAD_DIM = 64


class DraftOptions(BaseModel):
    """What a draft model is to be, and how it is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(500_000, ge=1, description="Tokens to record, at least.")
    layers: int = Field(4, ge=1, description="Layers of the draft.")
    width: int = Field(192, ge=HEAD_DIM, multiple_of=HEAD_DIM, description="Its hidden size, in steps of 64.")
    window: int = Field(256, ge=16)
    """Tokens that the draft sees of a text: its last ones."""
    epochs: float = Field(2.0, gt=0, description="How often each text is trained on.")
    batch: int = Field(8, ge=1)
    """Texts a step."""
    learning_rate: float = Field(2e-3, gt=0)
    """At its peak; it rises for a twentieth of the steps, then falls by a cosine to a tenth."""
    seed: int = Field(0, ge=0, description="Seed of the run.")


class CollectOptions(BaseModel):
    """How the trajectories of a consistency LLM are collected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(16, ge=2, le=128, description="Tokens of a window.")
    augment: float = Field(
        0.3, ge=0, le=1, description="Each point is kept once more with wrong tokens corrected, each with this chance."
    )
    together: int = Field(16, ge=1)
    """Texts decoded at once, and kept in one shard."""
    seed: int = Field(0, ge=0, description="Seed of what is corrected.")


class TrainOptions(BaseModel):
    """How a model is made consistent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(1, ge=1, description="How often each text is trained on.")
    learning_rate: float = Field(
        2e-5, gt=0, description="At its peak: it rises for a twentieth of the steps, then falls to a tenth."
    )
    ar_weight: float = Field(10.0, ge=0, description="Weight of the AR loss (w); with less, answers change more.")
    windows: int = Field(4, ge=1, description="Windows of a text in one forward, drawn from its trajectory.")
    accumulate: int = Field(4, ge=1, description="Texts a step.")
    together: int = Field(4, ge=1, description="Texts a forward: more are faster, and take more memory.")
    lora: int | None = Field(None, ge=1, description="Train LoRA matrices of this rank only.")
    gradient_checkpointing: bool = Field(False, description="Less memory, more time.")
    checkpoint_every: int = Field(200, ge=1)
    """Steps."""
    seed: int = Field(0, ge=0, description="Seed of the run.")


class ValueOptions(BaseModel):
    """What a value head is trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(400, ge=10, description="Questions; one of five is kept apart to choose and calibrate by.")
    samples: int = Field(8, ge=2, description="Solutions of a question, which share their beginnings.")
    layers: tuple[int, ...] = Field(
        (), description="Whose states are tried, with commas; by default four from half of the depth on."
    )
    concurrency: int = Field(16, ge=1, description="Questions searched at once.")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="As for tot eval.")
    quantize: Quantize = Field("auto", description="As for tot eval.")
    seed: int = Field(0, ge=0, description="Seed of the run.")

    @field_validator("layers", mode="before")
    @classmethod
    def _listed(cls, layers: object) -> object:
        return tuple(filter(None, layers.split(","))) if isinstance(layers, str) else layers
