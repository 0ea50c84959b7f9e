"""Derived seeds: every call of a search has its own, which depends on its content and not on its order."""

from __future__ import annotations

import hashlib
import json


def derive(*about: object) -> int:
    """Derive a 64-bit seed from plain values. Equal values give equal seeds on every machine."""
    text = json.dumps(about, ensure_ascii=True, separators=(",", ":"), default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
