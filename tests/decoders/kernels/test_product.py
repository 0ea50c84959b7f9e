"""Products of a small network, in C on the calling thread."""

from __future__ import annotations

import numpy as np
import pytest

from tot.decoders.kernels.native.product import product


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 32), (100, 64), (513, 1024), (7, 50)])
def test_a_product_equals_numpys_up_to_rounding_to_eight_bits(outputs: int, inputs: int, rows: int) -> None:
    random = np.random.default_rng(rows)
    weight, vectors = (random.normal(size=(count, inputs)).astype(np.float32) for count in (outputs, rows))
    found, expected = product(weight)(vectors), vectors @ weight.T
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 0.06 * expected.std()


def test_inputs_that_fill_no_group_are_multiplied_in_numpy() -> None:
    weight, vectors = np.ones((7, 50), np.float32), np.ones((2, 50), np.float32)
    assert (product(weight)(vectors) == 50).all()


def test_rows_may_be_a_view_of_other_numbers() -> None:
    weight = np.eye(32, dtype=np.float32)
    numbers = np.random.default_rng(0).normal(size=(64, 6))
    assert product(weight)(numbers[::2].T) == pytest.approx(numbers[::2].T, abs=0.05)
