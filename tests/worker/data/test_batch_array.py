"""Arrays of a global batch of which a rank has read its own rows, and functions of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.data.batch_array import BatchArray, whole
from nbdist.worker.data.row_functions import RowFunction, call

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, RANKS = 8, 2
X = np.arange(ROWS * 3 * 4, dtype=np.uint8).reshape(ROWS, 3, 4)
Y = np.arange(ROWS) % 3
MEAN = np.float32([1, 2, 3, 4])


class Reads:
    """Batch arrays of a rank, and the number of times that all rows were read."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.of_all = 0

    def array(self, values: np.ndarray) -> BatchArray:
        each = len(values) // RANKS
        first = self._rank * each

        def read() -> np.ndarray:
            self.of_all += 1
            return values

        return BatchArray(values[first : first + each], first, len(values), read)


def changed_in_place(x: Any, other: Any = None) -> Any:
    """Return an array that changes in place, also with another value."""
    x += 1
    x *= 3
    x -= MEAN.astype(x.dtype)
    return x if other is None else (x, other)


ROW_BY_ROW: dict[str, Callable[[Any, Any], Any]] = {
    "array of JAX": lambda x, y: call(jnp.asarray, x),
    "type": lambda x, y: call(np.array, x, dtype=np.float32),
    "function of a type": lambda x, y: call(jnp.float32, x),
    "scaled": lambda x, y: x / 255.0,
    "scaled in JAX": lambda x, y: call(jnp.array, x) / 255.0 - 0.5,
    "from the right": lambda x, y: 1 - 2 * x.astype(np.float32) + (3 / (1 + x)) + (-x) ** 2 // 3,
    "normalized": lambda x, y: (x.astype(np.float32) - MEAN) / MEAN[None, None],
    "from the right by arrays": lambda x, y: MEAN - x * np.float32(3) + jnp.asarray(MEAN),
    "powers": lambda x, y: 2 ** (y % 3) + 7 // (y + 1) + 5 % (y + 1),
    "array of JAX on the left": lambda x, y: jnp.asarray(MEAN) - call(jnp.asarray, x),
    "flat": lambda x, y: x.reshape(x.shape[0], -1),
    "flat by a length": lambda x, y: x.reshape((len(x), 12)),
    "flat by the size of a sample": lambda x, y: x.reshape(-1, 12),
    "flat by a function": lambda x, y: call(jnp.reshape, x, (-1, 4, 3)),
    "new axes": lambda x, y: x[..., None, None],
    "new axis of labels": lambda x, y: y[:, None],
    "new axis by a function": lambda x, y: call(jnp.expand_dims, x, axis=-1),
    "parts of rows": lambda x, y: x[:, :-1] + x[:, 1:, 0:1],
    "column": lambda x, y: x[..., 0, 1],
    "axes": lambda x, y: x.transpose(0, 2, 1),
    "axes by a function": lambda x, y: call(np.transpose, x, (0, 2, 1)),
    "classes": lambda x, y: call(jax.nn.one_hot, y, 3, dtype=jnp.float32),
    "elements": lambda x, y: call(np.sqrt, x.copy()) + call(np.exp, -x.astype(float)),
    "two arrays": lambda x, y: x[:, 0, 0] * y,
    "device": lambda x, y: call(jax.device_put, x),
    "devices of a tuple": lambda x, y: call(jax.device_put, (x, 3))[0],
    "tree": lambda x, y: call(jax.tree.map, jnp.asarray, {"x": x, "n": (1.0,)})["x"],
    "tree by a lambda": lambda x, y: call(
        jax.tree_util.tree_map, RowFunction(lambda v: call(jnp.asarray, v) / 2), (y, x)
    )[1],
    "comparison": lambda x, y: (x[:, 0, 0] > 3) & ~(y == 2) | (x[:, 1, 1] <= 20),
    "comparison of two arrays": lambda x, y: (3 - y >= y) ^ (y != x[:, 0, 0]),
    "limits": lambda x, y: x.clip(3, 60) + call(np.clip, x, 5, MEAN),
    "chosen elements": lambda x, y: call(jnp.where, x > 4, x, 0) + call(np.maximum, 7, x),
    "chosen elements of two arrays": lambda x, y: call(np.where, y > 0, x[:, 0, 0], y),
    "in place": lambda x, y: changed_in_place(x.astype(np.float32)),
    "in place in JAX": lambda x, y: changed_in_place(call(jnp.asarray, x)),
    "before it changes in place": lambda x, y: changed_in_place(z := x.copy(), 2 * z)[1],
    "items": lambda x, y: next(iter(call(map, jnp.asarray, (x, y)))),
}
ALL_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda x, y: call(np.mean, x, 0),
    "rows of another array": lambda x, y: x + np.ones((ROWS, 1, 1)),
    "further axis": lambda x, y: x + np.ones((2, 1, 1, 1)),
    "labels against columns": lambda x, y: x[:, :, :2].reshape(ROWS, 6)[:, :1] * y,
    "other rows": lambda x, y: x.reshape(2, -1),
    "rows of another length": lambda x, y: x.reshape(-1, 6),
    "order of the elements": lambda x, y: x.reshape(len(x), -1, order="F"),
    "first axis": lambda x, y: x[None],
    "some rows": lambda x, y: x[1:3],
    "row": lambda x, y: x[1],
    "chosen rows": lambda x, y: x[:, np.array([1, 0])],
    "swapped axes": lambda x, y: x.transpose(1, 0, 2),
    "reversed axes": lambda x, y: x.transpose(),
    "leading axis": lambda x, y: call(np.expand_dims, x, 0),
    "further dimensions": lambda x, y: call(np.array, x, ndmin=4),
    "classes of the first axis": lambda x, y: call(jax.nn.one_hot, y, 3, axis=0),
    "function of the user": lambda x, y: call(lambda array: array.cumsum(0), x),
    "function of the user on a tree": lambda x, y: call(
        jax.tree.map, lambda array: array - array.mean(), (x, y)
    )[0],
    "list": lambda x, y: call(np.array, (x, x)),
    "comparison with rows": lambda x, y: x > np.arange(ROWS)[:, None, None],
    "elements of other rows": lambda x, y: call(
        np.where, y[:, None] > 0, x[:, 0], np.ones((ROWS, 1))
    ),
    "places of elements": lambda x, y: call(np.where, y > 0)[0],
    "limits of rows": lambda x, y: x.clip(0, np.arange(ROWS)[:, None, None]),
    "one row after the other": lambda x, y: np.stack([*x]),
}


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_rows_that_need_no_others(name: str, rank: int) -> None:
    reads = Reads(rank)
    found = ROW_BY_ROW[name](reads.array(X), reads.array(Y))
    expected = ROW_BY_ROW[name](X, Y)
    assert isinstance(found, BatchArray)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert (found.ndim, found.size, len(found)) == (expected.ndim, expected.size, len(expected))
    each = ROWS // RANKS
    own = found.part(slice(rank * each, (rank + 1) * each))
    np.testing.assert_array_equal(own, expected[rank * each : (rank + 1) * each])
    assert reads.of_all == 0
    assert type(whole(found)) is type(expected)
    np.testing.assert_array_equal(whole(found), expected)
    assert reads.of_all


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", ALL_ROWS)
def test_rows_that_need_others(name: str, rank: int) -> None:
    reads = Reads(rank)
    found = ALL_ROWS[name](reads.array(X), reads.array(Y))
    assert not isinstance(found, BatchArray)
    np.testing.assert_array_equal(found, ALL_ROWS[name](X, Y))
    assert reads.of_all


def test_a_batch_of_one_row_for_each_rank() -> None:
    """An array with one row broadcasts over a rank's row, and not over the batch."""
    reads = Reads(1)
    found = reads.array(X[:2]) + X[4:6]
    np.testing.assert_array_equal(found, X[:2] + X[4:6])


def test_a_change_in_place_by_rows_of_another_array() -> None:
    reads, rows = Reads(1), np.arange(ROWS, dtype=np.uint8)[:, None, None]
    found = before = reads.array(X.copy())
    found += rows
    assert found is before
    np.testing.assert_array_equal(whole(found), X + rows)
    np.testing.assert_array_equal(found.part(slice(2, 5)), (X + rows)[2:5])
    found -= reads.array(X)
    np.testing.assert_array_equal(whole(found), X * 0 + rows)


def test_a_change_in_place_that_numpy_refuses() -> None:
    found = Reads(0).array(X)
    with pytest.raises(TypeError, match="Cannot cast"):
        found /= 255


def test_an_operand_that_changes_before_all_rows_are_read() -> None:
    mean = MEAN.copy()
    found = Reads(0).array(X) - mean
    mean += 1
    np.testing.assert_array_equal(whole(found), X - MEAN)


def test_rows_of_other_ranks() -> None:
    reads = Reads(0)
    np.testing.assert_array_equal(reads.array(X).part(slice(3, 6), slice(1)), X[3:6, :1])
    np.testing.assert_array_equal(np.asarray(reads.array(X)), X)


def test_type_that_gives_way() -> None:
    found = call(jnp.asarray, Reads(0).array(X)) / 255.0
    assert found.weak_type
    assert not Reads(0).array(X).weak_type


def test_arrays_under_a_mesh() -> None:
    """An array of JAX would belong to all processes of the mesh."""
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        found = call(jnp.asarray, Reads(0).array(X))
    np.testing.assert_array_equal(found, X)


class Value:
    """A value that changes later, such as a variable."""

    def __init__(self) -> None:
        self.value = 1.0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype)

    def __rmul__(self, other: Any) -> Any:
        return other * self.value


def test_operands_that_change_later() -> None:
    scale, numbers = Value(), [1.0, 2.0, 3.0, 4.0]
    found = Reads(0).array(X) * scale, Reads(0).array(X) * numbers
    scale.value = numbers[0] = 5.0
    np.testing.assert_array_equal(whole(found[0]), X)
    np.testing.assert_array_equal(whole(found[1]), X * np.array([1.0, 2.0, 3.0, 4.0]))


def test_transposed_array_of_jax() -> None:
    found = call(jnp.transpose, Reads(0).array(X), (0, 2, 1))
    assert isinstance(found, BatchArray)
    assert isinstance(whole(found), jax.Array)


def test_truth_is_that_of_all_rows() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Reads(0).array(X))
    assert not BatchArray(X[:1, 0, :1], 0, 1, lambda: X)


def test_lists_of_arrays_remain_lists() -> None:
    reads = Reads(0)
    found = whole([reads.array(X), {"y": (reads.array(Y), 1)}])
    assert type(found) is list
    np.testing.assert_array_equal(found[0], X)
    np.testing.assert_array_equal(found[1]["y"][0], Y)
    assert found[1]["y"][1] == 1


def test_values_without_batches() -> None:
    value = {"a": (1, [2])}
    assert whole(value) is value
    assert call(len, Reads(0).array(X)) == ROWS
    assert call(sorted, [2, 1], reverse=True) == [2, 1]
