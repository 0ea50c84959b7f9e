"""Worker processes: their replies are found in their output, and errors contain the last lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import SideError
from benchmarks.peers.worker import PeerWorker
from benchmarks.workloads import branches

pytestmark = pytest.mark.benches

WAVES = branches([1, 2, 3], 2, 4)


def test_replies_are_found_in_other_output(worker: Any) -> None:
    side = worker()
    assert side.about == "fake 1.0 with well"
    for measured in (side.run(WAVES), side.run(WAVES)):
        assert measured.pop("resident") > 2**20
        assert measured == {"seconds": 0.5, "prefill": 0.25, "tokens": 8}


def test_the_error_of_a_dead_worker_has_its_last_lines(worker: Any) -> None:
    side = worker("dies")
    with pytest.raises(SideError, match=r"it ended with status 3 \| out of memory"):
        side.run(WAVES)
    with pytest.raises(SideError, match="it ended with status 3"):
        side.run(WAVES)


def test_an_error_is_reported_and_the_worker_survives(worker: Any) -> None:
    side = worker("errs")
    for _ in range(2):
        with pytest.raises(SideError, match="too many sequences"):
            side.run(WAVES)


def test_a_hanging_worker_is_given_up(worker: Any) -> None:
    with pytest.raises(SideError, match="no reply within 0 s"):
        worker("hangs", patience=0.3).run(WAVES)


def test_too_few_tokens_are_an_error(worker: Any) -> None:
    with pytest.raises(SideError, match="it sampled 7 tokens instead of 8"):
        worker("short").run(WAVES)


def test_a_missing_interpreter_error_names_it() -> None:
    with pytest.raises(SideError, match="/nowhere/python can't be started"):
        PeerWorker(Path("/nowhere/python"), Path("worker.py"), {})


def test_a_missing_peer_package_error_names_it(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import no_such_engine\n")
    with pytest.raises(SideError, match="No module named 'no_such_engine'"):
        PeerWorker(Path(sys.executable), script, {})
