"""What was measured of a model is kept: read again by the next process, and made anew where anything has changed."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tot.decoders.drafting.kept import FORMAT, Kept, machine_identity, model_identity
from tot.decoders.drafting.latency_model import ROWS, latency_model
from tot.decoders.engine.runner import Runner

ABOUT = {"model": "some/tiny model", "threads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    # Whatever else runs on this machine.
    monkeypatch.setattr("tot.decoders.drafting.latency_model._disturbances", lambda: (0, 0))
    return tmp_path / "cache"


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every forward of any runner from here on."""
    counted: list[int] = []
    forward = Runner.forward

    def count(self: Runner, feeds: Any) -> Any:
        counted.append(len(feeds))
        return forward(self, feeds)

    monkeypatch.setattr(Runner, "forward", count)
    return counted


@pytest.fixture
def another(make_model: Callable[..., Any]) -> Iterator[Callable[..., Runner]]:
    """Runners as of another process each: on copies of one model, that came from a folder."""
    model = make_model()
    model.config.name_or_path = "/models/tiny"
    made: list[Runner] = []

    def runner(change: Callable[[Any], Any] = lambda model: None, kv_budget: int = 3000) -> Runner:
        own = copy.deepcopy(model)
        change(own)
        made.append(Runner(own, kv_budget))
        return made[-1]

    yield runner
    for one in made:
        one.close()


# -- files -----------------------------------------------------------------------------------------


def test_what_is_kept_is_read_again(cache: Path) -> None:
    Kept("costs", ABOUT).write([[1, 128, 0.5]])
    (file,) = (cache / "costs").iterdir()
    assert file.name.startswith("tiny-model-")
    assert Kept("costs", ABOUT).read() == [[1, 128, 0.5]]
    assert Kept("other", ABOUT).read() == []
    assert Kept("costs", ABOUT | {"threads": 2}).read() == []


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"format": 1}', b"\xff\xfe", json.dumps({"format": FORMAT, "about": ABOUT, "found": 3})],
)
def test_a_damaged_file_is_as_good_as_none(content: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept("costs", ABOUT)
    kept.path.parent.mkdir(parents=True)
    kept.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.INFO):
        assert kept.read() == []
    assert "it is made anew" in caplog.text
    kept.write([1])
    assert kept.read() == [1]


@pytest.mark.parametrize("change", [{"format": FORMAT + 1}, {"about": {"model": "another", "threads": 1}}])
def test_a_file_of_another_format_or_about_something_else_is_not_used(change: dict[str, Any]) -> None:
    kept = Kept("costs", ABOUT)
    kept.write([1])
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | change))
    assert kept.read() == []


def test_a_folder_that_cant_be_written_only_means_that_nothing_is_kept(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    kept = Kept("costs", ABOUT)
    with caplog.at_level(logging.INFO), kept.alone():
        kept.write([1])
    assert "can't be written" in caplog.text
    assert kept.read() == []


def _count_up(times: int) -> None:
    kept = Kept("counts", ABOUT)
    for _ in range(times):
        with kept.alone():
            (number,) = kept.read() or [0]
            kept.write([number + 1])


def test_processes_take_turns() -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_count_up, args=(20,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert Kept("counts", ABOUT).read() == [60]


# -- costs -----------------------------------------------------------------------------------------


def test_costs_are_measured_once_for_all_processes(another: Callable[..., Runner], forwards: list[int]) -> None:
    costs = latency_model(another())
    assert len(forwards) > len(ROWS)
    forwards.clear()
    assert latency_model(another()) == costs
    assert forwards == []


@pytest.mark.parametrize("disturbance", [(1000, 0), (0, 1)])
def test_costs_that_others_disturbed_are_for_this_process_only(
    disturbance: tuple[int, int], another: Callable[..., Runner], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor was taken away again and again, or memory had to be read from the disk."""
    seen = iter([(0, 0), (10**6 * disturbance[0], disturbance[1])])
    monkeypatch.setattr("tot.decoders.drafting.latency_model._disturbances", lambda: next(seen, (0, 0)))
    runner = another()
    costs = latency_model(runner)
    forwards.clear()
    assert latency_model(runner) == costs
    assert forwards == []
    latency_model(another())
    assert len(forwards) > len(ROWS)


def _other_weights(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[0, 0] += 0.5


def _other_name(model: Any) -> None:
    model.config.name_or_path = "/models/other"


def _other_config(model: Any) -> None:
    model.config.rms_norm_eps = 1e-4


def _other_layers(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = partial(type(layer).forward, layer)


@pytest.mark.parametrize(
    "change", [_other_weights, _other_name, _other_config, _other_layers, torch.nn.Module.bfloat16]
)
def test_another_model_is_measured_anew(
    change: Callable[[Any], Any], another: Callable[..., Runner], forwards: list[int]
) -> None:
    latency_model(another())
    forwards.clear()
    latency_model(another(change))
    assert len(forwards) > len(ROWS)
    forwards.clear()
    latency_model(another())
    latency_model(another(change))
    assert forwards == []


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("tot.decoders.drafting.kept.torch.get_num_threads", lambda: 7),
        ("tot.decoders.drafting.kept.processor", lambda: "a faster one"),
        ("tot.decoders.drafting.kept._engine_sources", lambda: "of another version"),
        ("tot.decoders.drafting.kept.torch.__version__", "99.0"),
        ("tot.decoders.drafting.kept.FORMAT", FORMAT + 1),
    ],
)
def test_another_machine_or_version_measures_anew(
    what: str, value: Any, another: Callable[..., Runner], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    latency_model(another())
    forwards.clear()
    monkeypatch.setattr(what, value)
    latency_model(another())
    assert len(forwards) > len(ROWS)


@pytest.mark.parametrize("part", ["native", "kernel"])
def test_what_computes_in_another_way_is_another_matter(
    part: str, another: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = another()
    identity = machine_identity(runner)
    monkeypatch.setattr(runner, part, SimpleNamespace(weights="int8"))
    assert machine_identity(runner) != identity


@pytest.mark.parametrize("found", [[[1, 128, -1.0]], [[1, 128]], [["a", 128, 1.0]], [3]])
def test_damaged_costs_are_measured_anew(found: list[Any], another: Callable[..., Runner]) -> None:
    latency_model(another())
    runner = another()
    kept = Kept("costs", model_identity(runner.model) | machine_identity(runner))
    assert len(kept.read()) == len(ROWS)
    kept.write(found)
    costs = latency_model(runner)
    assert costs.rows == ROWS
    assert len(kept.read()) == len(ROWS)


def test_deleting_the_folder_has_all_measured_again(
    cache: Path, another: Callable[..., Runner], forwards: list[int]
) -> None:
    latency_model(another())
    for file in (cache / "costs").iterdir():
        file.unlink()
    forwards.clear()
    latency_model(another())
    assert len(forwards) > len(ROWS)


def test_who_waited_for_another_reads_what_it_measured(another: Callable[..., Runner], forwards: list[int]) -> None:
    latency_model(another())
    once = len(forwards)
    forwards.clear()
    runners = [another(_other_name) for _ in range(2)]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda runner=runner: found.append(latency_model(runner))) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert len(forwards) == once


def test_what_is_missing_is_added(another: Callable[..., Runner], forwards: list[int]) -> None:
    latency_model(another(), (1, 4))
    forwards.clear()
    assert latency_model(another(), (1, 4, 16)).rows == (1, 4, 16)
    assert set(forwards) == {1, 16}  # the text before them is one feed
    forwards.clear()
    assert latency_model(another(), (16,)).rows == (1, 4, 16)
    assert forwards == []


def test_a_small_store_keeps_nothing_for_others(another: Callable[..., Runner], forwards: list[int]) -> None:
    latency_model(another(kv_budget=100))
    forwards.clear()
    assert latency_model(another()).rows == ROWS
    assert len(forwards) > len(ROWS)


def test_nothing_is_kept_of_a_model_from_nowhere(cache: Path, make_model: Callable[..., Any]) -> None:
    runner = Runner(make_model(), 3000)
    latency_model(runner)
    assert not cache.exists()
    runner.close()
