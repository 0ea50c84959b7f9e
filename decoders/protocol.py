"""What a decoder is to those who ask one, and the names of those that are here. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tot.decoders.budget import Meter
from tot.decoders.request import Completion, Request

LOCAL = ("ar", "auto", "fastcot", "jacobi", "lookahead", "mcsd", "pdos", "sd", "seed")
"""The decoding methods that run here: those of `METHODS`."""
REMOTE = ("openai",)
"""The decoders that ask a server, and have no model here."""


class Decoder(Protocol):
    """Requests in, completions out: flat and request-major, n completions a request."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@runtime_checkable
class AsyncDecoder(Decoder, Protocol):
    """A decoder that many searches can await at once, and whose texts can be cancelled and metered in the middle."""

    async def complete(self, requests: Sequence[Request], meter: Meter | None = None) -> list[list[Completion]]: ...
