"""Helpers for the client and the server of OpenAI's protocol: keys from the environment, loopback addresses, waits."""

from __future__ import annotations

import ipaddress
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime

from tot.decoders.errors import OptionError


def key_from(variable: str) -> str | None:
    """Return the API key in an environment variable, without surrounding whitespace; None if the variable is not set.

    Raises:
        OptionError: The key cannot be part of an HTTP header. The message names the variable and never shows the key.
    """
    key = os.environ.get(variable)
    if key is None:
        return None
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise OptionError(
            f"{variable} contains a line break, a control character or a non-ASCII character, which no HTTP header can "
            "carry: set it to the key alone"
        )
    return key


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and the addresses that reach only this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a reply's Retry-After, which may be a date; 0 if it has none."""
    given, seconds = headers.get("retry-after", ""), 0.0
    with suppress(ValueError, OverflowError):
        seconds = parsedate_to_datetime(given).timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(given)
    with suppress(ValueError):
        seconds = float(headers.get("retry-after-ms", "")) / 1000
    return seconds if 0 < seconds < math.inf else 0.0
