"""Options of the `openai` decoder: the server's address, how requests are sent, and the prices of tokens.

The API key is not an option. It is read from the environment, and only here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from tot.decoders.remote.network import key_from

KEY_VARIABLE = "OPENAI_API_KEY"
TRANSPORT = (
    *("base_url", "concurrency", "timeout", "retries", "input_price", "cached_price", "output_price"),
    *("backoff", "longest_wait"),
)
"""Options that do not affect the samples. The last two occur only in run folders of earlier versions."""
_SECRET = re.compile(
    r"(?i)api[_-]?key|passw|passphrase|secret|credential|authorization|bearer|(?:^|[_-])(?:key|auth|token)$|(?-i:Key|Token)$"
)
_RESERVED = ("model", "messages", "prompt", "n", "stream")


def _object(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        raise ValueError('not JSON: write {"name": value}') from None


def _names(given: Any) -> Iterator[str]:
    """Yield the names of all fields in JSON data, nested ones too."""
    if isinstance(given, dict):
        yield from given
    for value in given.values() if isinstance(given, dict) else given if isinstance(given, list) else ():
        yield from _names(value)


class RemoteOptions(BaseModel):
    """Options of `openai`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """The server's address, including the API version: http://127.0.0.1:8000/v1."""
    served: Annotated[str, Field(min_length=1)] | None = None
    """The model's name on the server; None uses the name passed to the decoder."""
    api: Literal["chat", "completions"] = "chat"
    """The route for messages: chat applies the server's template; completions joins them to one text, for base models.
    Prompts of text or token ids always use completions."""
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 64
    """Requests in flight at once."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds to wait for a reply."""
    retries: Annotated[int, Field(ge=0, le=100)] = 10
    """Maximum retries after a 429, a 5xx, a timeout, a dropped connection or an incomplete reply. The `openai` package
    waits 0.5 to 8 seconds between attempts, about a minute in total, or the time that the server requests."""
    logprobs: bool = False
    """Request the logprobs of new tokens; without them `Completion.logprob` is nan."""
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """Additional tokens for a model's thinking. If above 0, the client applies the stop strings, to the answer only."""
    input_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Price of a million prompt tokens, in any currency."""
    cached_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Price of a million prompt tokens from the server's cache; None uses `input_price`."""
    output_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Price of a million new tokens."""
    extra: Annotated[dict[str, Any], BeforeValidator(_object)] = {}
    """Additional request fields, as JSON: {"chat_template_kwargs": {"enable_thinking": false}}."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, given: str) -> str:
        given = given.strip()
        if not given.isprintable() or " " in given:
            raise ValueError("not an address: write http://host:port/v1")
        try:
            parts = urlsplit(given)
            _ = parts.port  # raises ValueError if it is not a number
        except ValueError:
            raise ValueError("not an address: write http://host:port/v1") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an address: write http://host:port/v1")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError(
                f"an address must not contain a user, password or query: set the API key in {KEY_VARIABLE}"
            )
        return given.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _harmless(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in _names(given):
            if _SECRET.search(name):
                raise ValueError(f"{name} looks like a secret: set the API key in {KEY_VARIABLE}")
        for name in given:
            if name in _RESERVED:
                raise ValueError(f"the decoder sets {name} itself: remove it")
        return given

    def cost(self, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> float:
        """Return the cost of these tokens, in the currency of the prices."""
        cached_price = self.input_price if self.cached_price is None else self.cached_price
        priced = (prompt_tokens - cached_tokens) * self.input_price + cached_tokens * cached_price
        return (priced + new_tokens * self.output_price) / 1e6


def key() -> str | None:
    """Return the API key, or None if it is not set. Raises OptionError for a key that an HTTP header cannot contain."""
    return key_from(KEY_VARIABLE) or None
