"""SEED: its options, and the errors for bad ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import OptionError, Request, load_decoder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_config": (2, 0)}, "option k_config: .*greater than or equal to 1"),
        ({"k_config": "2,-1"}, "option k_config: .*greater than or equal to 1"),
        ({"k_config": ()}, "option k_config: .*at least 1 item"),
        ({"k_config": "two"}, "option k_config: .*valid integer"),
        ({"k_config": (65,)}, "option k_config: .*less than or equal to 64"),
        ({"k_config": 3}, "option k_config: .*valid tuple"),
        ({"rule": "leviathan"}, "takes one candidate per position: give k_config=1,1,1, or rule=mcsd"),
        ({"rule": "leviathan", "k_config": (1, 2)}, "takes one candidate per position"),
        ({"rule": "strict"}, "option rule: .*'coupled', 'leviathan' or 'mcsd'"),
        ({"policy": "all"}, "option policy: .*'packed' or 'rounds'"),
        ({"overlap": True}, "overlap is for policy=rounds: leave it out"),
        ({"k": 3}, r"option k: .* \(its options: .*policy, overlap, adapt, k_config"),
    ],
)
def test_bad_options_are_refused(bench: Any, options: dict[str, Any], message: str) -> None:
    engine = bench.engine()
    with pytest.raises(OptionError, match=f"decoder seed.*{message}"):
        load_decoder("seed", engine=engine, **options)


def test_k_config_may_be_text(bench: Any, plain: Callable[..., Request]) -> None:
    (got,) = bench.seed(bench.model_drafter(), k_config="3,1,1", adapt=False).generate([plain(max_tokens=40)])
    assert (got.usage.forwards, got.usage.drafted) == (10, 90)
