"""Masked rows are sampled as rows whose forbidden logits are -infinity, in C and in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.engine import sampling
from tot.decoders.engine.sampling import Draw, candidates, distribution, read

draws = st.builds(
    Draw,
    st.sampled_from([0.0, 0.7, 1.0]),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 99),
    st.just(0),
    st.integers(0, 99),
    mask=st.none(),
)


@pytest.mark.parametrize("language", ["c", "numpy"])
@given(draws, st.sampled_from([1, 31, 33, 400, 3001]), st.integers(0, 10**6), st.sampled_from([0.002, 0.5, 1.0]))
def test_a_mask_is_minus_infinity(language: str, how: Draw, vocab: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((2, vocab)) * 3).astype(np.float32)
    allowed = rng.random(vocab) < share
    allowed[rng.integers(vocab)] = True
    bits = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    bits[:vocab] = allowed
    masked = how._replace(mask=np.packbits(bits, bitorder="little").view("<u4"))
    by_hand = logits.copy()
    by_hand[0][~allowed] = -math.inf
    with pytest.MonkeyPatch.context() as patch:
        if language == "numpy":
            patch.setattr(sampling, "_compiled", lambda: None)
        got, expected = read(logits, [masked, how]), read(by_hand, [how, how])
        assert [one.token for one in got] == [one.token for one in expected]
        assert allowed[got[0].token]
        given_token = read(logits[:1], [got[0].token])[0]  # the model's log-probability, without the mask
        assert got[0].logprob == given_token.logprob
        assert candidates(logits, [masked, how], 5) == candidates(by_hand, [how, how], 5)
    assert (distribution(logits[0], masked) == distribution(by_hand[0], how)).all()
