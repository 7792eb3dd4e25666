"""Division of arrays into slabs."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbdist.worker.remote import offers


@given(
    st.lists(st.integers(0, 7), max_size=4),
    st.integers(1, 16),
    st.integers(1, 64),
)
def test_slabs_cover_each_element_once_in_order(
    shape: list[int], itemsize: int, limit: int
) -> None:
    before, offers.SLAB_BYTES = offers.SLAB_BYTES, limit
    try:
        indices = list(offers.slabs(shape, itemsize))
    finally:
        offers.SLAB_BYTES = before
    numbers = np.arange(math.prod(shape)).reshape(shape)
    pieces = [numbers[(*index, ...)].reshape(-1) for index in indices]
    assert all(piece.size * itemsize <= max(limit, itemsize) for piece in pieces)
    covered = np.concatenate(pieces) if pieces else np.zeros(0)
    np.testing.assert_array_equal(covered, numbers.reshape(-1))
