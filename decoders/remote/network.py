"""Helpers for the client and the server of OpenAI's protocol: keys from the environment, and loopback addresses."""

from __future__ import annotations

import ipaddress
import os

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
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
