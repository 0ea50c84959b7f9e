"""Limits of a server, validated when the server is created, and the environment variable of its API key."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

KEY_VARIABLE = "TOT_SERVE_KEY"
"""The environment variable with the API key; unset if no key is required."""


class Limits(BaseModel):
    """Limits per request, and for all requests together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: int = Field(64, ge=1, description="Requests decoded concurrently; further requests wait.")
    max_searches: int = Field(16, ge=1, description="Searches under way; further searches wait.")
    queue: int = Field(256, ge=0, description="Maximum waiting requests, shared by their clients; others get a 429.")
    max_tokens_limit: int = Field(2048, ge=1, description="Maximum number of new tokens per completion.")
    max_samples: int = Field(128, ge=1)
    """Maximum samples per request: prompts times n."""
    timeout: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds per request, after which the reply is the text so far (finish reason length), or 503.",
    )
    max_body: int = Field(2**20, ge=1, description="Maximum bytes of a request's body; larger ones are rejected (413).")
    body_timeout: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Seconds within which the complete body must arrive (otherwise 408)."""
    grace: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that running requests have to finish when the server stops.",
    )
