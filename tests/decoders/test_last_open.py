"""LastOpen: a value is shared while in use, and at most one is kept afterwards."""

from __future__ import annotations

import threading

import pytest

from tot.decoders.engine.last_open import LastOpen


class Thing:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.fit = True

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@pytest.fixture
def last() -> LastOpen[Thing]:
    return LastOpen(Thing.close, lambda thing: thing.fit)


def test_an_idle_value_is_closed_before_another_is_created(last: LastOpen[Thing]) -> None:
    with last.use("a", lambda: Thing("a")) as first:
        pass
    seen = []

    def make() -> Thing:
        seen.append(first.closed)
        return Thing("b")

    with last.use("b", make):
        assert seen == [True]


def test_a_value_in_use_stays_open_and_is_shared(last: LastOpen[Thing]) -> None:
    with last.use("a", lambda: Thing("a")) as outer, last.use("a", lambda: Thing("other")) as inner:
        assert inner is outer
        with last.use("b", lambda: Thing("b")) as beside:
            last.close_idle()
            assert not beside.closed
        assert not outer.closed
    assert beside.closed  # only the last one is kept
    last.close_idle()
    assert outer.closed


def test_threads_with_the_same_key_share_one_value(last: LastOpen[Thing]) -> None:
    made: list[Thing] = []
    together = threading.Barrier(4)

    def make() -> Thing:
        made.append(Thing("a"))
        return made[-1]

    def work() -> None:
        together.wait()
        with last.use("a", make) as thing:
            together.wait()
            assert not thing.closed

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
