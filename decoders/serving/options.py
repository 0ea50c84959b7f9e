"""What a server allows: one model, checked once where the server is made; and where its key comes from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

KEY_VARIABLE = "TOT_SERVE_KEY"
"""The environment variable that holds the key, if one is wanted."""


class Limits(BaseModel):
    """The most that clients may ask for, one by one and together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: int = Field(64, ge=1, description="Requests decoded at once; more of them wait.")
    queue: int = Field(256, ge=0, description="Requests that may wait; more of them are refused (429).")
    max_tokens: int = Field(2048, ge=1)
    """New tokens of any text, and what a chat gets that doesn't say."""
    max_samples: int = Field(128, ge=1)
    """Texts of one request: prompts times n."""
    timeout: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds from a request's arrival; then what is there is the reply, ended by length, or 503.",
    )
    max_body: int = Field(2**20, ge=1, description="Most bytes of a request's body; more are refused (413).")
    body_timeout: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Seconds in which a body has to arrive whole (408)."""
    grace: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that running requests have to end when the server is told to stop.",
    )
