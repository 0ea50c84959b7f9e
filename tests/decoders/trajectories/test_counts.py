"""Jacobi trajectories: counted tokens, and texts that are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cllm import stationary
from tot.decoders import Engine, OptionError, Request
from tot.decoders.training.cllm.settings import CollectOptions
from tot.decoders.training.cllm.trajectories import collect, given, repeats_itself

pytestmark = pytest.mark.training

SMALL = CollectOptions(n=6, together=4)


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


def test_a_shard_of_other_requests_is_rewritten(
    engine: Engine, tmp_path: Path, shards: Callable[..., dict[str, bytes]], requests: Callable[..., list[Request]]
) -> None:
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


def test_given_texts_have_no_windows_and_end(
    engine: Engine, tmp_path: Path, rows: Callable[..., list[dict[str, Any]]], requests: Callable[..., list[Request]]
) -> None:
    heard: list[int] = []
    texts = [(one, f" and so on {i}") for i, one in enumerate(requests())]
    given(engine.loaded, texts, tmp_path, tell=heard.append)
    found = rows(tmp_path, engine)
    assert heard == [10]
    for row, (request, text) in zip(found, texts, strict=True):
        assert row["prompt"] == engine.codec.encode_prompt(request.prompt)
        assert row["response"] == [*engine.codec.encode(text), engine.loaded.tokenizer.eos_token_id]
        assert row["starts"] == row["points"] == row["corrected"] == []
    with pytest.raises(OptionError, match="was started"):
        collect(engine, requests(), tmp_path, SMALL)
