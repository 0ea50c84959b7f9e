"""Jacobi trajectories: a stopped run resumes, only with its original model and options."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from pyarrow import parquet

from tot.decoders import Engine, ModelError, OptionError, Request, load_model
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.decoders.training.cllm.train import train
from tot.decoders.training.cllm.trajectories import collect, trajectories

pytestmark = pytest.mark.training

SMALL = CollectOptions(n=6, together=4)


def stop_after(texts: int) -> Callable[..., None]:
    def tell(done: int, *_: int) -> None:
        if done >= texts:
            raise KeyboardInterrupt

    return tell


def test_a_killed_run_resumes_after_its_last_complete_shard(
    engine: Engine,
    tmp_path: Path,
    requests: Callable[..., list[Request]],
    shards: Callable[..., dict[str, bytes]],
    rows: Callable[..., list[dict[str, Any]]],
) -> None:
    progress: list[tuple[int, ...]] = []
    collect(engine, requests(14), tmp_path / "whole", SMALL, lambda *counts: progress.append(counts))
    stopped = tmp_path / "stopped"
    for texts, count in ((4, 1), (12, 3)):
        with pytest.raises(KeyboardInterrupt):
            collect(engine, requests(14), stopped, SMALL, stop_after(texts))
        assert len(shards(stopped)) == count
    before, forwards = {path: path.stat().st_mtime_ns for path in stopped.glob("*.parquet")}, engine.forwards
    again: list[tuple[int, ...]] = []
    collect(engine, requests(14), stopped, SMALL, lambda *counts: again.append(counts))
    assert again == progress  # counts include the shards that existed
    assert progress[-1][1] > 14
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert engine.forwards - forwards < 35  # two texts of 30 tokens
    assert shards(stopped) == shards(tmp_path / "whole")
    assert rows(stopped, engine) == rows(tmp_path / "whole", engine)
    assert len(rows(stopped, engine)) == 14


def test_an_incomplete_shard_is_not_read(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requests: Callable[..., list[Request]],
    rows: Callable[..., list[dict[str, Any]]],
    shards: Callable[..., dict[str, bytes]],
) -> None:
    collect(engine, requests(), tmp_path / "whole", SMALL)
    cut = tmp_path / "cut"
    write = parquet.write_table

    def half(table: Any, file: Any) -> None:
        write(table, file)
        if "00001" in file.name:
            file.truncate(100)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "write_table", half)
        with pytest.raises(KeyboardInterrupt):
            collect(engine, requests(), cut, SMALL)
    assert [name[:12] for name in shards(cut)] == ["shard-00000-"]
    assert rows(cut, engine) == rows(tmp_path / "whole", engine)[:4]
    collect(engine, requests(), cut, SMALL)
    assert shards(cut) == shards(tmp_path / "whole")
    assert not list(cut.glob("*.tmp"))


def test_shards_written_by_datasets_are_read_and_resumed(
    engine: Engine, tmp_path: Path, requests: Callable[..., list[Request]], rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """Earlier versions wrote shards with `datasets` instead of pyarrow."""
    collect(engine, requests(6), tmp_path, SMALL)
    found, forwards = rows(tmp_path, engine), engine.forwards
    ids = List(Value("int32"))
    nested = List(List(ids))
    features = Features({"prompt": ids, "response": ids, "starts": ids, "points": nested, "corrected": nested})
    for shard in tmp_path.glob("shard-*.parquet"):
        Dataset.from_list(parquet.read_table(shard).to_pylist(), features).to_parquet(shard)
    collect(engine, requests(6), tmp_path, SMALL)
    assert rows(tmp_path, engine) == found
    assert engine.forwards == forwards


def test_requests_are_read_on_demand(
    engine: Engine, tmp_path: Path, requests: Callable[..., list[Request]], shards: Callable[..., dict[str, bytes]]
) -> None:
    """Rows are written shard by shard, so at most one shard's rows are in memory."""
    read = 0
    heard: list[tuple[int, int, int]] = []

    def source() -> Iterator[Request]:
        nonlocal read
        for request in requests():
            read += 1
            yield request

    collect(engine, source(), tmp_path, SMALL, lambda texts, *_: heard.append((read, texts, len(shards(tmp_path)))))
    assert heard == [(4, 4, 1), (8, 8, 2), (10, 10, 3)]


def test_another_model_is_refused_with_both_named(
    engine: Engine,
    make_model: Callable[..., Any],
    tokenizer: Any,
    tmp_path: Path,
    shards: Callable[..., dict[str, bytes]],
    requests: Callable[..., list[Request]],
) -> None:
    collect(engine, requests(2), tmp_path, SMALL)
    other = make_model(seed=1, readable=True)
    other.config.name_or_path = "second"
    message = r"trajectories of first \(weights \w+\), not of second \(weights \w+\): collect them with this model"
    loaded = load_model(other, tokenizer=tokenizer)
    with pytest.raises(ModelError, match=message):
        list(trajectories(tmp_path, loaded))
    with pytest.raises(ModelError, match=message):
        train(loaded, tmp_path, tmp_path / "out", TrainOptions())
    before = shards(tmp_path)
    with Engine(loaded, 2000) as another, pytest.raises(ModelError, match=message):
        collect(another, requests(6), tmp_path, SMALL)
    assert shards(tmp_path) == before
    assert json.loads((tmp_path / "settings.json").read_text())["model"] == "first"


def test_another_tokenizer_is_refused_with_both_named(
    engine: Engine, target: Any, tokenizer: Any, tmp_path: Path, requests: Callable[..., list[Request]]
) -> None:
    collect(engine, requests(2), tmp_path, SMALL)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["chimera"])
    model = copy.deepcopy(target)
    model.config.name_or_path = "second"
    message = r"trajectories of first \(tokenizer \w+\), not of second \(tokenizer \w+\)"
    with pytest.raises(ModelError, match=message):
        list(trajectories(tmp_path, load_model(model, tokenizer=other)))


@pytest.mark.parametrize("change", [{"n": 7}, {"augment": 0.5}, {"together": 2}, {"seed": 1}])
def test_a_run_does_not_resume_with_other_options(
    engine: Engine,
    tmp_path: Path,
    change: dict[str, Any],
    requests: Callable[..., list[Request]],
    shards: Callable[..., dict[str, bytes]],
) -> None:
    collect(engine, requests(2), tmp_path, SMALL)
    ((name, value),) = change.items()
    message = f"was started with {name}={getattr(SMALL, name)}, not {value}: resume with the same options, or give"
    with pytest.raises(OptionError, match=message):
        collect(engine, requests(6), tmp_path, SMALL.model_copy(update=change))
    assert len(shards(tmp_path)) == 1
    collect(engine, requests(6), tmp_path, SMALL)


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused(
    engine: Engine,
    tmp_path: Path,
    requests: Callable[..., list[Request]],
    rows: Callable[..., list[dict[str, Any]]],
    version: int,
) -> None:
    collect(engine, requests(2), tmp_path, SMALL)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["format"] == 2
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"format": version}))
    with pytest.raises(
        OptionError, match=f"trajectories in format {version}, and this version reads format 2: collect them"
    ):
        rows(tmp_path, engine)
    with pytest.raises(OptionError, match=f"was started with format={version}, not 2: resume with the same options"):
        collect(engine, requests(2), tmp_path, SMALL)
