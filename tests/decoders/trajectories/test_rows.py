"""Jacobi trajectories: the rows written for a text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import Engine, OptionError, Request, Sampling, load_decoder, load_model
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.decoders.training.cllm.train import train
from tot.decoders.training.cllm.trajectories import collect, trajectories

pytestmark = pytest.mark.training

SMALL = CollectOptions(n=6, together=4)


def test_rows_are_the_texts_of_ar_with_their_windows(
    engine: Engine,
    tmp_path: Path,
    requests: Callable[..., list[Request]],
    rows: Callable[..., list[dict[str, Any]]],
    shards: Callable[..., dict[str, bytes]],
) -> None:
    collected = requests()
    reports: list[tuple[int, int, int]] = []
    collect(engine, collected, tmp_path, SMALL, lambda *counts: reports.append(counts))
    found = rows(tmp_path, engine)
    expected = load_decoder(engine=engine).generate(collected)
    assert [row["response"] for row in found] == [list(one.tokens) for one in expected]
    assert [row["prompt"] for row in found] == [engine.codec.encode_prompt(request.prompt) for request in collected]
    for row in found:
        assert len(row["starts"]) == len(row["points"]) == len(row["corrected"]) >= 3
        assert all(len(point) == 6 for points in row["points"][:-1] for point in points)
        for points, corrected in zip(row["points"], row["corrected"], strict=True):
            assert len(points) == len(corrected) > 0
    assert [texts for texts, _, _ in reports] == [4, 8, 10]
    assert reports[-1][1:] == (sum(len(row["starts"]) for row in found), 0)
    assert [name[:12] for name in shards(tmp_path)] == ["shard-00000-", "shard-00001-", "shard-00002-"]


@pytest.mark.parametrize("augment", [0.0, 0.4, 1.0])
def test_corrected_points_differ_only_where_they_were_wrong(
    engine: Engine,
    tmp_path: Path,
    augment: float,
    rows: Callable[..., list[dict[str, Any]]],
    requests: Callable[..., list[Request]],
) -> None:
    collect(engine, requests(), tmp_path, SMALL.model_copy(update={"augment": augment}))
    wrong = right = 0
    for row in rows(tmp_path, engine):
        for start, points, copies in zip(row["starts"], row["points"], row["corrected"], strict=True):
            fixed = row["response"][start : start + len(points[0])]
            for point, corrected in zip(points, copies, strict=True):
                assert len(corrected) == len(fixed)
                for token, copied, goal in zip(point, corrected, fixed, strict=True):
                    assert copied in (token, goal)
                    wrong += token != goal
                    right += token != goal and copied == goal
    assert wrong > 200
    assert right / wrong == pytest.approx(augment, abs=0.1 if 0 < augment < 1 else 0)


def test_a_request_for_several_samples_gives_several_rows(
    engine: Engine, tmp_path: Path, requests: Callable[..., list[Request]], rows: Callable[..., list[dict[str, Any]]]
) -> None:
    collected = requests(2, n=3)
    heard: list[int] = []
    collect(engine, collected, tmp_path, SMALL, lambda texts, *_: heard.append(texts))
    expected = load_decoder(engine=engine).generate(collected)
    assert [row["response"] for row in rows(tmp_path, engine)] == [list(one.tokens) for one in expected]
    assert len(expected) == 6
    assert heard == [2]


def test_texts_shorter_than_a_window_are_kept_with_their_end(
    engine: Engine, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """A stop string ends some texts after one or two tokens. Each has a row, and its guessed tokens form a window."""
    stops = ("a", "e", "o", "1", " ")
    sampling = [Sampling(max_tokens=30, temperature=1.0, seed=i, ignore_eos=True, stop=stops) for i in range(12)]
    collected = [Request(prompt="The sum of 10 and 11", sampling=how) for how in sampling]
    heard: list[tuple[int, int, int]] = []
    collect(engine, collected, tmp_path, CollectOptions(n=16), lambda *counts: heard.append(counts))
    expected = load_decoder(engine=engine).generate(collected)
    lengths = [len(one.tokens) for one in expected]
    assert min(lengths) == 1
    assert sum(1 < length < 16 for length in lengths) > 3
    assert [row["response"] for row in rows(tmp_path, engine)] == [list(one.tokens) for one in expected]
    assert heard[-1][2] == 0
    for row in rows(tmp_path, engine):
        length = len(row["response"])
        if length < 16:
            assert row["starts"] == [0]
            assert all(len(point) == length for point in row["points"][0])


def constant(model: Any) -> Any:
    """Make a model write the same token forever."""
    model.lm_head.weight.data.zero_()
    model.lm_head.bias.data.zero_()
    model.lm_head.bias.data[60] = 5.0
    return model


def test_repetitive_texts_are_left_out_and_not_trained_on(
    target: Any,
    tokenizer: Any,
    tmp_path: Path,
    requests: Callable[..., list[Request]],
    shards: Callable[..., dict[str, bytes]],
) -> None:
    loaded = load_model(constant(copy.deepcopy(target)), tokenizer=tokenizer)
    heard: list[tuple[int, int, int]] = []
    with Engine(loaded, 3000) as engine:
        collect(engine, requests(6, heat=0.0), tmp_path / "data", SMALL, lambda *counts: heard.append(counts))
    assert heard == [(4, 0, 4), (6, 0, 6)]
    assert len(shards(tmp_path / "data")) == 2  # they record that these requests are done
    assert list(trajectories(tmp_path / "data", loaded)) == []
    with pytest.raises(OptionError, match="data holds no texts to train on: none were collected, or all were rep"):
        train(loaded, tmp_path / "data", tmp_path / "out", TrainOptions())
    assert not (tmp_path / "out").exists()


def test_without_requests_no_rows_are_written(
    engine: Engine, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    heard: list[Any] = []
    collect(engine, [], tmp_path, SMALL, lambda *counts: heard.append(counts))
    assert heard == []
    assert rows(tmp_path, engine) == []
    with pytest.raises(OptionError, match="holds no texts to train on"):
        train(engine.loaded, tmp_path, tmp_path / "out", TrainOptions())


def test_a_folder_without_trajectories_is_refused(
    engine: Engine, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            OptionError, match=f"{folder} holds no trajectories: give a folder that `tot train collect`"
        ):
            rows(folder, engine)
