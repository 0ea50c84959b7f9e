"""What goes wrong with a server: failures that may pass, bodies that it refuses, and what it says about them.

A server's words are data: on one line, cut short, without control characters and without the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from tot.decoders.errors import RequestError

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529)
"""Statuses that a repetition may find gone; the last seven are those of proxies and of overloaded services."""
REQUESTS_FAULT = (400, 413, 422, 431)
_LONGEST = 200
"""Characters."""


class RefusedError(RequestError):
    """The server can't serve this body; `said` is why, in its words."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class PassingError(Exception):
    """A failure that may pass."""

    def __init__(self, reason: str, wait: float | None = None, refused: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        """Seconds that the server asks for."""
        self.refused = refused
        """No connection came about."""
        self.sent_at = 0.0
        """When the attempt was sent, by `time.monotonic`."""


def said(content: bytes, kind: str, secret: str | None) -> str:
    """What a server says went wrong, whatever shape it gives that; "" for a web page."""
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        return "" if "html" in kind else plain(content.decode("utf-8", "replace"), secret)
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return plain(found if isinstance(found, str) else json.dumps(found), secret)


def plain(text: str, secret: str | None) -> str:
    """A server's text as an error repeats it."""
    if secret:
        text = text.replace(secret, "…")
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:10_000]).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds, from a Retry-After of seconds or of a date."""
    given = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(given)) if float(given) < float("inf") else None
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # neither, or a date without a time zone
        return None
