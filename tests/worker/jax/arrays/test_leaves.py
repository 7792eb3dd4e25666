"""Leaves of a step's state: arrays, constants, and numbers that become arrays."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.worker.jax.arrays.leaves import (
    Leaves,
    as_data,
    described,
    is_array,
    is_own,
    is_spread,
    placed,
    raw,
)


def single_device() -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.NamedSharding(mesh, jax.P())


def refusal(leaves: Leaves, after: list[Any]) -> str:
    with pytest.raises(StepError) as caught:
        leaves.collect(leaves.arrays, after)
    return str(caught.value)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (np.ones(2), True),
        (np.ones(2, bool), True),
        (np.array("a"), False),
        (np.array([None]), False),
        (jnp.ones(2), True),
        (jax.random.key(0), True),
        (jax.ShapeDtypeStruct((2,), "float32"), True),
        (np.float32(1), False),
        (1, False),
    ],
)
def test_arrays_are_data_for_jax(leaf: Any, expected: bool) -> None:
    assert is_array(leaf) is expected


def test_arrays_and_constants_keep_their_order() -> None:
    leaves = Leaves([np.ones(2), 3, "a", np.zeros(1)])
    assert [array.shape for array in leaves.arrays] == [(2,), (1,)]
    assert leaves.filled(["x", "y"]) == ["x", 3, "a", "y"]
    assert leaves.of_arrays([0, 1, 2, 3]) == [0, 3]


def test_wide_numbers_become_those_of_jax() -> None:
    assert raw(np.ones(2, "float64")).dtype == np.float32
    array = jnp.ones(2)
    assert raw(array) is array


def test_unchanged_constants_and_equal_types_are_collected() -> None:
    model = object()
    leaves = Leaves([jnp.ones(2), 3, "a", model])
    new = jnp.zeros(2)
    (found,) = leaves.collect(leaves.arrays, [new, 3, "a", model])
    assert found is new
    assert leaves.is_settled
    assert not leaves.settle()


def test_weak_value_takes_the_type_of_the_array() -> None:
    leaves = Leaves([np.ones((), "float32")])
    (found,) = leaves.collect(leaves.arrays, [2])
    assert (found.dtype, found.weak_type, float(found)) == (np.float32, False, 2.0)


def test_number_that_changes_becomes_an_array() -> None:
    leaves = Leaves([jnp.ones(2), 3])
    leaves.collect(leaves.arrays, [jnp.ones(2), jnp.asarray(4)])
    assert not leaves.is_settled
    assert leaves.settle()
    assert [array.shape for array in leaves.arrays] == [(2,), ()]
    assert leaves.arrays[1] == 3
    assert leaves.arrays[1].weak_type
    leaves.collect(leaves.arrays, [jnp.ones(2), leaves.arrays[1] + 1])
    assert leaves.is_settled
    assert not leaves.settle()


def test_number_takes_the_wider_type_of_its_change() -> None:
    leaves = Leaves([0])
    leaves.collect(leaves.arrays, [jnp.float32(0.5)])
    leaves.settle()
    assert (leaves.arrays[0].dtype, leaves.arrays[0].weak_type) == (jnp.float32, False)


def test_number_is_an_array_of_fixed_type_once_settled() -> None:
    leaves = Leaves([0])
    leaves.collect(leaves.arrays, [jnp.asarray(1)])
    leaves.settle()
    leaves.settle()
    before = described(leaves.arrays[0])
    assert refusal(leaves, [jnp.float32(0.5)]) == f"0 changes from {before} to float32[]"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (np.ones(2, "float32"), np.ones(3, "float32"), "float32[2] to float32[3]"),
        (np.ones(2, "float32"), np.ones(2, "int32"), "float32[2] to int32[2]"),
        (np.ones((), "int32"), 0.5, "int32[] to 0.5"),
        (np.ones(2, "float32"), "a", "float32[2] to 'a'"),
        (np.ones(2, "float32"), None, "float32[2] to None"),
        (3, np.ones(2, "float32"), "3 to float32[2]"),
        (0.5, np.ones((), "int32"), "0.5 to int32[]"),
        ("a", "b", "'a' to 'b'"),
        (3, "3", "3 to '3'"),
    ],
)
def test_other_changes_are_refused(before: Any, after: Any, text: str) -> None:
    assert refusal(Leaves([before]), [after]) == f"0 changes from {text}"


def test_error_is_that_of_the_caller() -> None:
    leaves = Leaves(["a", "b"], lambda index, how: StepError(f"leaf {index} {how}"))
    with pytest.raises(StepError, match=re.escape("leaf 1 changes from 'b' to 'c'")):
        leaves.collect([], ["a", "c"])


def test_equal_numbers_of_another_type_are_a_change() -> None:
    leaves = Leaves([1, True, 0.0])
    leaves.collect([], [1, True, 0.0])
    assert leaves.is_settled
    leaves.collect([], [1.0, True, 0.0])
    assert not leaves.is_settled


def test_shape_without_data_cannot_be_placed() -> None:
    with pytest.raises(StepError, match=r"an array of float32\[2\] without data"):
        placed(jax.ShapeDtypeStruct((2,), "float32"), single_device())


def test_array_in_its_place_is_not_moved() -> None:
    array = placed(np.arange(3), single_device())
    assert placed(array, single_device()) is array
    assert array.tolist() == [0, 1, 2]


def test_own_arrays_are_converted_to_numpy() -> None:
    assert is_own(np.ones(2))
    assert is_own(jnp.ones(2))
    assert not is_own(1.0)
    assert not is_spread(jnp.ones(2))
    key = jax.random.key(3)
    np.testing.assert_array_equal(as_data(key), np.asarray(jax.random.key_data(key)))
