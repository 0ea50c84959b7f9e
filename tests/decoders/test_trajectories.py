"""Jacobi trajectories: the rows of a text, its windows, repetitive texts, and resuming."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.cllm import stationary
from benchmarks.texts import write_texts
from tot.decoders import Completion, Engine, ModelError, OptionError, Request, Sampling, Usage, load_decoder, load_model
from tot.decoders.training.cllm.settings import CollectOptions, TrainOptions
from tot.decoders.training.cllm.train import train
from tot.decoders.training.cllm.trajectories import collect, repeats_itself, trajectories, windows

pytestmark = pytest.mark.training

SMALL = CollectOptions(n=6, together=4)
LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "


@pytest.fixture(scope="module")
def target(make_model: Callable[..., Any]) -> Any:
    model = make_model(readable=True)
    model.config.name_or_path = "first"
    return model


@pytest.fixture
def engine(target: Any, tokenizer: Any) -> Iterator[Engine]:
    """An engine on a copy of the target, so that the target stays unmodified. All slots must be free at the end."""
    made = Engine(load_model(copy.deepcopy(target), tokenizer=tokenizer), 6000)
    yield made
    made.close()
    assert made.cache.live == 0


def requests(count: int = 10, tokens: int = 30, heat: float = 1.0, **more: Any) -> list[Request]:
    """Return sampled requests, because a random model's greedy text soon loops."""
    sampling = {"max_tokens": tokens, "temperature": heat, "ignore_eos": True, **more}
    return [Request(prompt=LONG[i:], sampling=Sampling(seed=i, **sampling)) for i in range(count)]


def rows(folder: Path, engine: Engine) -> list[dict[str, Any]]:
    return list(trajectories(folder, engine.loaded))


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.parquet"))}


def test_rows_are_the_texts_of_ar_with_their_windows(engine: Engine, tmp_path: Path) -> None:
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
def test_corrected_points_differ_only_where_they_were_wrong(engine: Engine, tmp_path: Path, augment: float) -> None:
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


def test_texts_shorter_than_a_window_are_kept_with_their_end(engine: Engine, tmp_path: Path) -> None:
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


def test_repetitive_texts_are_left_out_and_not_trained_on(target: Any, tokenizer: Any, tmp_path: Path) -> None:
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


def completion(tokens: Sequence[int], trajectory: Sequence[tuple[int, tuple[int, ...]]]) -> Completion:
    return Completion("", tuple(tokens), 0.0, "eos", Usage(), trajectory=tuple(trajectory))


@pytest.mark.parametrize("n", [2, 6, 13])
def test_points_follow_from_each_other_by_equation_3(
    engine: Engine, target: Any, logits_alone: Callable[..., Tensor], n: int
) -> None:
    with load_decoder("jacobi", engine=engine, n=n, adapt=False, trajectory=True) as decoder:
        texts = decoder.generate(requests(4, tokens=40, heat=0.0))
    seen = 0
    for request, text in zip(requests(4), texts, strict=True):
        prompt = engine.codec.encode_prompt(request.prompt)
        found = windows(text, n)
        assert found
        for start, points, fixed in found:
            assert fixed == list(text.tokens[start : start + n])[: len(fixed)]
            assert fixed not in points
            before = [*prompt, *text.tokens[:start]]
            for point, later in pairwise([*points, fixed]):  # the last point leads to the fixed one
                assert len(point) == len(fixed)
                logits = logits_alone(target, [*before, *point[:-1]])[len(before) - 1 :]
                assert logits.argmax(-1).tolist() == later
                seen += 1
    assert seen > 40


def test_points_are_complete_even_if_a_step_computes_the_rest_of_a_window() -> None:
    text = completion(
        [1, 2, 3, 4, 5, 6, 7],
        [(0, (9, 9, 9)), (1, (8, 3)), (2, (3,)), (4, (5, 9, 7)), (6, (7,))],
    )
    assert windows(text, 3) == [(0, [[9, 9, 9], [1, 8, 3]], [1, 2, 3]), (4, [[5, 9, 7]], [5, 6, 7])]


def test_a_window_at_the_end_holds_the_rest_of_the_text() -> None:
    points = [(0, (9, 9, 9)), (1, (2, 3)), (4, (8, 8, 8)), (5, (7, 7))]
    first = (0, [[9, 9, 9]], [1, 2, 3])
    expected = [first, (4, [[8, 8, 8], [5, 7, 7]], [5, 6, 7])]
    assert windows(completion([1, 2, 3, 4, 5, 6, 7], points), 3) == expected
    assert windows(completion([1, 2, 3, 4, 5, 6], points), 3) == [first, (4, [[8, 8], [5, 7]], [5, 6])]
    assert windows(completion([1, 2, 3, 4, 5], points[:3]), 3) == [first, (4, [[8]], [5])]
    assert windows(completion([1, 2], points[:2]), 3) == [(0, [[9, 9]], [1, 2])]  # a text shorter than a window
    no_room = [(0, (5, 5)), (1, (5,)), (2, ())]  # the last token that fits is never guessed
    assert windows(completion([1, 2, 3], no_room), 3) == [(0, [[5, 5], [1, 5]], [1, 2])]
    assert windows(completion([], []), 3) == []


@pytest.mark.parametrize(
    ("points", "fixed", "expected"),
    [
        ([], [1, 2, 3], 0),
        ([[1, 2, 9]], [1, 2, 3], 0),  # only the last was wrong
        ([[9, 2, 9]], [1, 2, 3], 1),  # 2 was right after a wrong 9, and stayed
        ([[9, 2, 3]], [1, 2, 3], 2),
        ([[9, 2, 3], [1, 8, 3]], [1, 2, 3], 1),  # 2 changed again, then followed its corrected prefix
        ([[9, 9, 3], [1, 9, 3]], [1, 2, 3], 1),
        ([[9, 9, 3], [1, 9, 8]], [1, 2, 3], 0),  # 3 was right and became wrong
        ([[9, 9, 9, 4], [9, 2, 9, 8], [1, 2, 9, 4]], [1, 2, 3, 4], 2),  # 4 the second time
        ([[1, 2, 9], [1, 2, 8]], [1, 2, 3], 0),
    ],
)
def test_stationary_tokens_are_correct_early_and_stay(points: list[list[int]], fixed: list[int], expected: int) -> None:
    assert stationary(points, fixed) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("a", False),
        ("The sum of 10 and 11 is 21, so the other one is 10.", False),
        ("10 10 and 11 11 and 1010", False),
        ("12 + 12 = 24, 24 + 24 = 48, 48 + 48 = 96", False),
        ("no no no", False),
        ("nooo", False),
        ("nooooooo", False),
        ("noooooooo", True),  # a token eight times
        ("It costs $10000, or 1000000 cents.", False),
        ("no no no no ", True),
        ("1, 1, 1, 1, 1, 1", True),
        ("It is 5. abcdefghabcdefghabcdefgh", False),  # eight tokens three times
        ("It is 5. abcdefghabcdefghabcdefghabcdefgh", True),
        ("She has 3 apples. Then she buys 2. She has 3 apples. She eats one.", False),
        ("She has 3 apples. Then she buys 2. She  has 3 apples! Or not. she has 3 apples.", True),
        ("Yes. Maybe. Yes. Perhaps. Yes. No.", False),  # a short sentence may recur
        ("How many are there?\nI do not know.\nHow many are there?\nFive.\nHow many are there?\n", True),
    ],
)
def test_loops_of_tokens_or_sentences_are_distinguished_from_ordinary_text(text: str, expected: bool) -> None:
    assert repeats_itself([*text.encode()], text) is expected


def test_a_shard_of_other_requests_is_rewritten(engine: Engine, tmp_path: Path) -> None:
    """Six requests, of which the last shard holds two, then all ten."""
    collect(engine, requests()[:6], tmp_path, SMALL)
    first = shards(tmp_path)
    collect(engine, requests(), tmp_path, SMALL)
    after = shards(tmp_path)
    assert len(after) == 3
    assert next(iter(first)) in after
    assert set(first) - set(after)
    collect(engine, requests(), tmp_path / "whole", SMALL)
    assert after == shards(tmp_path / "whole")


def test_an_answer_trigger_is_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="trigger"):
        collect(engine, [Request(prompt="The", answer_trigger=" So")], tmp_path, SMALL)


def test_given_texts_have_no_windows_and_end(engine: Engine, tmp_path: Path) -> None:
    heard: list[int] = []
    texts = [(one, f" and so on {i}") for i, one in enumerate(requests())]
    write_texts(engine.loaded, texts, tmp_path, tell=heard.append)
    found = rows(tmp_path, engine)
    assert heard == [10]
    for row, (request, text) in zip(found, texts, strict=True):
        assert row["prompt"] == engine.codec.encode_prompt(request.prompt)
        assert row["response"] == [*engine.codec.encode(text), engine.loaded.tokenizer.eos_token_id]
        assert row["starts"] == row["points"] == row["corrected"] == []
    with pytest.raises(OptionError, match="was started"):
        collect(engine, requests(), tmp_path, SMALL)


def stop_after(texts: int) -> Callable[..., None]:
    def tell(done: int, *_: int) -> None:
        if done >= texts:
            raise KeyboardInterrupt

    return tell


def test_a_killed_run_resumes_after_its_last_complete_shard(engine: Engine, tmp_path: Path) -> None:
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


def test_another_model_is_refused_with_both_named(
    engine: Engine, make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
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
    engine: Engine, target: Any, tokenizer: Any, tmp_path: Path
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
def test_a_run_does_not_resume_with_other_options(engine: Engine, tmp_path: Path, change: dict[str, Any]) -> None:
    collect(engine, requests(2), tmp_path, SMALL)
    ((name, value),) = change.items()
    message = f"was started with {name}={getattr(SMALL, name)}, not {value}: resume with the same options, or give"
    with pytest.raises(OptionError, match=message):
        collect(engine, requests(6), tmp_path, SMALL.model_copy(update=change))
    assert len(shards(tmp_path)) == 1
    collect(engine, requests(6), tmp_path, SMALL)


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused(engine: Engine, tmp_path: Path, version: int) -> None:
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
