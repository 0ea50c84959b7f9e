"""Options of the `openai` decoder: where the server is, how it is asked, and what it costs.

The key is none of them: it is read from the environment here, and nowhere else.
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
"""Options that texts don't depend on; the last two are of earlier versions, as folders of theirs have them."""
_SECRET = re.compile(
    r"(?i)api[_-]?key|passw|passphrase|secret|credential|authorization|bearer|(?:^|[_-])(?:key|auth|token)$|(?-i:Key|Token)$"
)
_SET_ELSEWHERE = ("model", "messages", "prompt", "n", "stream")


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
    """Where the server is, up to and with its version: http://127.0.0.1:8000/v1."""
    served: Annotated[str, Field(min_length=1)] | None = None
    """The model's name at the server; None is the name that the decoder was given."""
    api: Literal["chat", "completions"] = "chat"
    """How messages are sent: chat applies the server's template; completions joins them to one text, for base models.
    Prompts that are text or token ids always go to completions."""
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 64
    """Requests in flight at once."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds to wait for a reply."""
    retries: Annotated[int, Field(ge=0, le=100)] = 10
    """How often a request is repeated after a 429, a 5xx, a timeout, a dropped connection or a reply cut short, by the
    `openai` package: after half a second at first and eight at most, about a minute in all, or as the server asks."""
    logprobs: bool = False
    """Ask for the log-probabilities of what is drawn; without them `Completion.logprob` is nan."""
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that a thinking model gets besides, for its thinking; stop strings are then looked for in its answer only,
    and here."""
    input_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Of a million prompt tokens, in any currency."""
    cached_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Of a million prompt tokens that the server had cached; None is the same as others."""
    output_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Of a million new tokens."""
    extra: Annotated[dict[str, Any], BeforeValidator(_object)] = {}
    """Fields to send besides, as JSON: {"chat_template_kwargs": {"enable_thinking": false}}."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, given: str) -> str:
        given = given.strip()
        if not given.isprintable() or " " in given:
            raise ValueError("not an address: write http://host:port/v1")
        try:
            parts = urlsplit(given)
            _ = parts.port  # raises where it is no number
        except ValueError:
            raise ValueError("not an address: write http://host:port/v1") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an address: write http://host:port/v1")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError(
                f"an address without user, password or query, please: keys come from the environment ({KEY_VARIABLE})"
            )
        return given.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _harmless(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in _names(given):
            if _SECRET.search(name):
                raise ValueError(f"{name} looks like a key: keys come from the environment ({KEY_VARIABLE})")
        for name in given:
            if name in _SET_ELSEWHERE:
                raise ValueError(f"{name} is what the decoder sets itself: leave it out")
        return given

    def cost(self, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> float:
        """What so many tokens cost."""
        cached_price = self.input_price if self.cached_price is None else self.cached_price
        priced = (prompt_tokens - cached_tokens) * self.input_price + cached_tokens * cached_price
        return (priced + new_tokens * self.output_price) / 1e6


def key() -> str | None:
    """Return the key, or None if the environment has none. Raises OptionError for one that no header can carry."""
    return key_from(KEY_VARIABLE) or None
