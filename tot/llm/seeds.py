"""Seeds derived, never shared: every call of a search gets its own from what it is about, not from when it is made."""

from __future__ import annotations

import hashlib
import json


def derive(*about: object) -> int:
    """A 64-bit seed from plain values: equal values give equal seeds on every machine."""
    text = json.dumps(about, ensure_ascii=True, separators=(",", ":"), default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
