"""Options of the `openai` decoder: the server's address, and how requests are sent.

The API key is not an option. It is read from the environment, and only here.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

KEY_VARIABLE = "OPENAI_API_KEY"
TRANSPORT = ("base_url", "concurrency", "timeout", "retries")
"""Options that do not affect the samples."""
_SECRET = re.compile(
    r"(?i)api[_-]?key|passw|passphrase|secret|credential|authorization|bearer|(?:^|[_-])(?:key|auth|token)$|(?-i:Key|Token)$"
)
_RESERVED = {"model", "messages", "prompt", "n", "stream"}


def _object(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        raise ValueError('not JSON: write {"name": value}') from None


class RemoteOptions(BaseModel):
    """Options of `openai`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """The server's address, including the API version: http://127.0.0.1:8000/v1."""
    server: Literal["auto", "vllm", "sglang", "llama-server", "ollama", "tot", "openai"] = "auto"
    """The kind of server, whose differences from OpenAI's protocol are known; auto reads it from the server's list
    of models. Set it for a server behind a proxy."""
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 64
    """Requests in flight at once."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds to wait for a reply."""
    retries: Annotated[int, Field(ge=0, le=100)] = 10
    """Maximum retries after a 429, a 5xx, a timeout, a dropped connection or an invalid reply. The waits between
    attempts grow from 0.5 to 8 seconds, about a minute in total, or are the server's Retry-After."""
    output_retries: Annotated[int, Field(ge=0, le=100)] = 2
    """How often to ask again for a reply that violates a constraint or the schema of a tool, which a server may not
    enforce. 0 refuses constraints that the server is not known to have."""
    logprobs: bool = False
    """Request the logprobs of new tokens; without them `Completion.logprob` is nan."""
    extra: Annotated[dict[str, Any], BeforeValidator(_object)] = {}
    """Additional request fields, as JSON: {"provider": {"sort": "price"}}."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, given: str) -> str:
        given = given.strip()
        try:
            parts = urlsplit(given)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is not a number
            valid = False
        if not valid or not given.isprintable() or " " in given:
            raise ValueError("not an address: write http://host:port/v1")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError(
                f"an address must not contain a user, password or query: set the API key in {KEY_VARIABLE}"
            )
        return given.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _harmless(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in re.findall(r'"((?:[^"\\]|\\.)*)":', json.dumps(given)):  # nested ones, too
            if _SECRET.search(name):
                raise ValueError(f"{name} looks like a secret: set the API key in {KEY_VARIABLE}")
        if reserved := given.keys() & _RESERVED:
            raise ValueError(f"the decoder sets {min(reserved)} itself: remove it")
        return given
