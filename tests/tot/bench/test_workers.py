"""A worker's replies are found among what it prints, and its end is told with its last words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tot.bench.engines import SideError
from tot.bench.peers.worker import PeerWorker
from tot.bench.workloads import branches

pytestmark = pytest.mark.benches

WAVES = branches([1, 2, 3], 2, 4)


def test_replies_are_found_among_chatter(worker: Any) -> None:
    side = worker()
    assert side.about == "fake 1.0 with well"
    for took in (side.run(WAVES), side.run(WAVES)):
        assert took.pop("resident") > 2**20
        assert took == {"seconds": 0.5, "tokens": 8}


def test_the_last_words_of_a_dead_worker_are_told(worker: Any) -> None:
    side = worker("dies")
    with pytest.raises(SideError, match=r"it ended with status 3 \| out of memory"):
        side.run(WAVES)
    with pytest.raises(SideError, match="it ended with status 3"):
        side.run(WAVES)


def test_an_error_is_told_and_the_worker_lives(worker: Any) -> None:
    side = worker("errs")
    for _ in range(2):
        with pytest.raises(SideError, match="too many sequences"):
            side.run(WAVES)


def test_a_worker_that_hangs_is_given_up(worker: Any) -> None:
    with pytest.raises(SideError, match="no reply within 0 s"):
        worker("hangs", patience=0.3).run(WAVES)


def test_too_few_tokens_are_no_result(worker: Any) -> None:
    with pytest.raises(SideError, match="it sampled 7 tokens instead of 8"):
        worker("short").run(WAVES)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(SideError, match="/nowhere/python can't be started"):
        PeerWorker(Path("/nowhere/python"), Path("worker.py"), {})


def test_an_environment_without_the_peer_says_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import no_such_engine\n")
    with pytest.raises(SideError, match="No module named 'no_such_engine'"):
        PeerWorker(Path(sys.executable), script, {})
