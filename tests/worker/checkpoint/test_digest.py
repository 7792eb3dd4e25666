"""Digests of values."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.worker.checkpoint.digest import (
    WHOLE_BYTES,
    chunks,
    of_array,
    of_arrays,
    of_facts,
    of_keys,
    of_sample,
)


@given(
    kind=some.sampled_from(["float64", "float32", "float16", ml_dtypes.bfloat16, "int64", "bool"]),
    shape=some.lists(some.integers(1, 9), max_size=3),
    place=some.integers(0),
)
def test_one_changed_bit_changes_the_digest(kind: str, shape: list[int], place: int) -> None:
    array = np.zeros(shape, kind)
    before = of_array(array)
    assert -(2**31) <= before < 2**31
    octets = array.reshape(-1).view(np.uint8)
    place %= 8 * octets.size
    octets[place // 8] ^= 1 << place % 8
    assert of_array(array) != before
    assert of_arrays([np.ones(3), array]) != of_arrays([np.ones(3), np.zeros(shape, kind)])


def test_object_addresses_do_not_change_the_digest() -> None:
    first, second = (np.array([object(), "a", 1], object) for _ in range(2))
    assert of_array(first) == of_array(second)
    second[1] = "b"
    assert of_array(first) != of_array(second)


@pytest.mark.parametrize("kind", [None, object])
def test_digest_of_texts(kind: type | None) -> None:
    assert of_arrays([np.array(["a", "b"], kind)]) == of_arrays([np.array(["a", "b"], kind)])
    assert of_arrays([np.array(["a", "b"], kind)]) != of_arrays([np.array(["a", "c"], kind)])


def test_digest_of_empty_and_transposed_arrays() -> None:
    assert of_array(np.zeros((0, 3))) == of_array(np.zeros(0)) == of_arrays([]) == 0
    square = np.arange(4.0).reshape(2, 2)
    assert of_array(square.T) == of_array(square.T.copy())


@pytest.mark.parametrize("kind", ["float64", "float16", "int8"])
def test_sample_of_a_large_array_reaches_from_its_first_to_its_last_value(kind: str) -> None:
    array = np.zeros(3 * WHOLE_BYTES, kind)
    parts = chunks(array.size, array.itemsize)
    assert len(parts) == 16
    assert (parts[0].start, parts[-1].stop) == (0, array.size)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(parts))
    assert sum(part.stop - part.start for part in parts) * array.itemsize == WHOLE_BYTES
    sample = of_sample(array[part] for part in parts)
    assert sample == of_array(np.concatenate([array[part] for part in parts]))
    for place in (0, parts[7].start, array.size - 1):
        changed = array.copy()
        changed[place] = 1
        assert of_sample(changed[part] for part in parts) != sample


def test_digest_of_keys_is_independent_of_their_order() -> None:
    groups = {1: [3, 4], 0: [5]}
    assert of_keys(groups) == of_keys({0: (5,), 1: {4, 3}})
    assert of_keys({}) != of_keys(groups) != of_keys({1: [3], 0: [4, 5]})


def test_digests_are_signed_numbers_of_32_bits() -> None:
    numbers = [of_array(np.array(value)) for value in range(64)]
    assert min(numbers) < 0 < max(numbers)
    assert np.array(numbers, np.int32).tolist() == numbers
    assert of_array(np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926 - 2**32  # CRC-32's check


def test_digests_of_facts_depend_on_value_and_type() -> None:
    numbers = [next(iter(of_facts({"a": value}))).number for value in (1, 1.0, True, "1", None)]
    assert len(set(numbers)) == 5
