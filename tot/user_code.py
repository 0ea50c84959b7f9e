"""The gateway to what users write besides tasks: searches, generators, evaluators, hooks and decoders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tot.decoders.errors import TaskError, TotError


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise TaskError, naming the part, for any exception of it in the block that is not TotError."""
    try:
        yield
    except TotError:
        raise
    except Exception as error:
        raise TaskError(f"{what} raised {type(error).__name__}: {error}") from error
