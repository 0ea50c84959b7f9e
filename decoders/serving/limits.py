"""What a server allows: one model, checked once where the server is made; and where its key comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

KEY_VARIABLE = "TOT_SERVE_KEY"
"""The environment variable that holds the key, if one is wanted."""


class Limits(BaseModel):
    """The most that clients may ask for, one by one and together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: Annotated[int, Field(ge=1)] = 64
    """Requests that are decoded at once; more of them wait."""
    queue: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait; more of them are refused (429)."""
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    """New tokens of any text, and what a chat gets that doesn't say."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: as the model's context and the store of keys and values allow."""
    max_samples: Annotated[int, Field(ge=1)] = 128
    """Texts of one request: prompts times n."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds from a request's arrival. What was written by then is the reply, ended by "length"; 503 where that is
    nothing."""
    max_body: Annotated[int, Field(ge=1)] = 2**20
    """Bytes of a request's body; more are refused (413)."""
    body_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Seconds in which a body has to arrive whole (408)."""
    grace: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds that running requests have to end when the server is told to stop."""
