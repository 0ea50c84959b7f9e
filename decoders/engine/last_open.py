"""LastOpen: what takes long to open, models say, is shared while it is in use, and the last one stays open after."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Opened(Generic[_T]):
    def __init__(self, value: _T) -> None:
        self.value = value
        self.users = 0


class LastOpen(Generic[_T]):
    """At most one value is open that nobody uses: the one last used. Any thread may ask."""

    def __init__(self, close: Callable[[_T], None], keep: Callable[[_T], bool] = lambda value: True) -> None:
        """`keep` is asked of a value whose last user has left: whether it is fit for the next one."""
        self._close, self._keep = close, keep
        self._opened: dict[Hashable, _Opened[_T]] = {}
        self._lock = threading.RLock()

    @contextmanager
    def use(self, key: Hashable, make: Callable[[], _T]) -> Iterator[_T]:
        """The value that is open under this key, or a new one, for which an idle one is closed first."""
        with self._lock:  # whoever wants the same waits for it
            if key not in self._opened:
                self.close_idle()
                self._opened[key] = _Opened(make())
            opened = self._opened[key]
            opened.users += 1
        try:
            yield opened.value
        finally:
            with self._lock:
                opened.users -= 1
                if not opened.users and not sys.is_finalizing():  # which frees all, and closing may need what is gone
                    del self._opened[key]
                    self.close_idle()
                    if self._keep(opened.value):
                        self._opened[key] = opened
                    else:
                        self._close(opened.value)

    def close_idle(self) -> bool:
        """Close what nobody uses. True where there was something."""
        with self._lock:
            idle = [key for key, opened in self._opened.items() if not opened.users]
            for key in idle:
                self._close(self._opened.pop(key).value)
            return bool(idle)
