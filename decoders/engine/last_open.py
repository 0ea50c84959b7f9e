"""LastOpen: share values that are slow to open, such as models, and keep the last one open after its use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Entry(Generic[_T]):
    """A value and the number of its users."""

    def __init__(self, value: _T) -> None:
        self.value = value
        self.users = 0


class LastOpen(Generic[_T]):
    """Share open values by key. Only the last one used stays open when idle, with those used beside it. Thread-safe."""

    def __init__(self, close: Callable[[_T], None], keep: Callable[[_T], bool] = lambda value: True) -> None:
        """`keep` decides whether a value can be reused after its last user has left."""
        self._close, self._keep = close, keep
        self._entries: dict[Hashable, _Entry[_T]] = {}
        self._lock = threading.RLock()

    @contextmanager
    def use(self, key: Hashable, make: Callable[[], _T], beside: Collection[Hashable] = ()) -> Iterator[_T]:
        """Yield the value open under this key, or close idle values, except those `beside`, and open a new one."""
        with self._lock:  # other users of this key wait until it is open
            if key not in self._entries:
                self.close_idle(beside)
                self._entries[key] = _Entry(make())
            entry = self._entries[key]
            entry.users += 1
        try:
            yield entry.value
        finally:
            with self._lock:
                entry.users -= 1
                if not entry.users and not sys.is_finalizing():  # at exit, closing may need freed modules
                    del self._entries[key]
                    self.close_idle(beside)
                    if self._keep(entry.value):
                        self._entries[key] = entry
                    else:
                        self._close(entry.value)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether the value of this key is open."""
        return key in self._entries

    def close_idle(self, but: Collection[Hashable] = ()) -> None:
        """Close the idle values, except those under the keys `but`."""
        with self._lock:
            idle = [key for key, entry in self._entries.items() if not entry.users and key not in but]
            for key in idle:
                self._close(self._entries.pop(key).value)
