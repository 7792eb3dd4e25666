"""Array of a global batch of which a rank has read its own rows.

Operations that compute each row from this row only, such as `x / 255`, compute the rank's rows, and
those of the others if anything needs them. Every other use computes with all rows.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

METHODS = (
    *("astype", "copy", "reshape", "transpose"),
    *("cpu", "detach", "float", "numpy", "permute"),  # of PyTorch
)
"""Methods that may compute each row from this row only."""


MOST_PARTS = 100
"""Largest number of arrays in a list of a batch."""


class BatchArray:
    """Array of a global batch of which a rank has read its own rows.

    Args:
        own: the rows that the rank has read, an array of NumPy or JAX, or a tensor of PyTorch or
            TensorFlow.
        first: number of the first one.
        rows: number of rows of the batch.
        read: returns all rows.
    """

    __array_ufunc__ = None  # `array - batch` calls `__rsub__`

    def __init__(self, own: Any, first: int, rows: int, read: Callable[[], Any]) -> None:
        self.dtype = own.dtype
        self.ndim: int = own.ndim
        self.shape: tuple[int, ...] = type(own.shape)((rows, *own.shape[1:]))
        self._is_tensor = callable(getattr(own, "size", None))
        self.size: Any = self._size if self._is_tensor else math.prod(self.shape)
        self._own = own
        self._first = first
        self._read = read

    @property
    def weak_type(self) -> bool:
        """True for arrays of JAX whose type gives way to that of others."""
        return bool(getattr(self._own, "weak_type", False))

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.whole())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.whole(), dtype, copy=copy)

    def whole(self) -> Any:
        """Return all rows."""
        return self._own if len(self._own) == len(self) else self._read()

    def part(self, rows: slice, *rest: slice) -> np.ndarray:
        """Return some rows, with a slice for each axis."""
        start, stop, _ = rows.indices(len(self))
        start, stop = start - self._first, stop - self._first
        if 0 <= start <= stop <= len(self._own):
            return np.asarray(self._own)[(slice(start, stop), *rest)]
        return np.asarray(self.whole())[(rows, *rest)]

    def apply(self, function: Callable[[Any], Any]) -> BatchArray:
        """Return the results of a function that computes each row from this row only."""
        read = lambda: function(self.whole())  # noqa: E731
        return BatchArray(function(self._own), self._first, len(self), read)

    def __getitem__(self, index: Any) -> Any:
        if _keeps_rows(index, self.ndim):
            return self.apply(lambda rows: rows[index])
        return self.whole()[index]

    def astype(self, *arguments: Any, **options: Any) -> BatchArray:
        return self.apply(lambda rows: rows.astype(*arguments, **options))

    def copy(self) -> BatchArray:
        return self.apply(lambda rows: rows.copy())

    def reshape(self, *shape: Any, **options: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        sizes = [*map(operator.index, sizes)]
        if sizes.count(-1) == 1:
            known = -math.prod(sizes)
            sizes[sizes.index(-1)] = math.prod(self.shape) // known if known else 0
        fits = bool(sizes) and sizes[0] == len(self) and math.prod(sizes) == math.prod(self.shape)
        if not fits or not math.prod(sizes) or min(sizes) < 0 or options:
            return self.whole().reshape(*shape, **options)
        return self.apply(lambda rows: rows.reshape(len(rows), *sizes[1:]))

    def _size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def cpu(self) -> BatchArray:
        return self.apply(lambda rows: rows.cpu())

    def detach(self) -> BatchArray:
        return self.apply(lambda rows: rows.detach())

    def float(self) -> BatchArray:
        return self.apply(lambda rows: rows.float())

    def numpy(self) -> BatchArray:
        return self.apply(lambda rows: rows.numpy())

    def permute(self, *axes: Any) -> Any:
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        if not order or order[0] != 0:
            return self.whole().permute(*axes)
        return self.apply(lambda rows: rows.permute(*axes))

    def transpose(self, *axes: Any) -> Any:
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        if self._is_tensor or not order or order[0] != 0:
            return self.whole().transpose(*axes)
        return self.apply(lambda rows: rows.transpose(*axes))

    def __neg__(self) -> BatchArray:
        return self.apply(operator.neg)

    def __pos__(self) -> BatchArray:
        return self.apply(operator.pos)

    def _with(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        """Return the result of an operation of two operands; this array is the first one."""
        if isinstance(other, BatchArray):
            has_same_rows = (self._first, len(self._own)) == (other._first, len(other._own))
            if not has_same_rows or len(self) != len(other) or self.ndim != other.ndim:
                return function(self.whole(), other.whole())
            read = lambda: function(self.whole(), other.whole())  # noqa: E731
            return BatchArray(function(self._own, other._own), self._first, len(self), read)
        shape = np.shape(other)
        if len(shape) > self.ndim or (len(shape) == self.ndim and shape[0] != 1):
            return function(self.whole(), other)
        if isinstance(other, np.ndarray):
            other = other.copy()  # the user may change it before all rows are read
        return self.apply(lambda rows: function(rows, other))

    def __add__(self, other: Any) -> Any:
        return self._with(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._with(_reflected(operator.add), other)

    def __sub__(self, other: Any) -> Any:
        return self._with(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(_reflected(operator.sub), other)

    def __mul__(self, other: Any) -> Any:
        return self._with(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with(_reflected(operator.mul), other)

    def __truediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(_reflected(operator.truediv), other)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(operator.floordiv, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with(_reflected(operator.floordiv), other)

    def __mod__(self, other: Any) -> Any:
        return self._with(operator.mod, other)

    def __rmod__(self, other: Any) -> Any:
        return self._with(_reflected(operator.mod), other)

    def __pow__(self, other: Any) -> Any:
        return self._with(operator.pow, other)

    def __rpow__(self, other: Any) -> Any:
        return self._with(_reflected(operator.pow), other)


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda second, first: function(first, second)


def _keeps_rows(index: Any, ndim: int) -> bool:
    """Return True if an index such as `[:, 1:]` or `[..., None]` takes parts of each row."""
    parts = index if isinstance(index, tuple) else (index,)
    known = all(part is None or part is ... or type(part) in (int, slice) for part in parts)
    if not known or not parts:
        return False
    if parts[0] is not ...:
        return type(parts[0]) is slice and parts[0] == slice(None)
    return sum(type(part) in (int, slice) for part in parts) < ndim


def has_rows(value: Any) -> bool:
    """Return True for a batch array, and for a dict, list or tuple that contains one."""
    if type(value) in (dict, list, tuple):
        if type(value) is list and len(value) > MOST_PARTS:
            return False  # data of the user, not parts of a batch
        return any(map(has_rows, value.values() if isinstance(value, dict) else value))
    return isinstance(value, BatchArray)


def whole(value: Any) -> Any:
    """Return a value with all rows of the batches in it; other values are returned themselves."""
    if not has_rows(value):
        return value
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return type(value)(map(whole, value)) if isinstance(value, (list, tuple)) else value.whole()
