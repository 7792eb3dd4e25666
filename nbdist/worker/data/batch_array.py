"""Array of a global batch of which a rank has read its own rows.

Operations that compute each row from this row only, such as `x / 255`, compute the rank's rows, and
those of the others if anything needs them. Every other use computes with all rows.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

METHODS = (
    *("astype", "clip", "copy", "reshape", "transpose"),
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
    __hash__ = None  # type: ignore[assignment]  # as that of arrays

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
        return self.together(function, (self,))

    def has_rows_of(self, other: BatchArray) -> bool:
        """Return True if another batch array has as many axes, and the same own rows."""
        own, its = ((len(a), a.ndim, a._first, len(a._own)) for a in (self, other))
        return own == its

    def together(self, function: Callable[..., Any], operands: Sequence[Any]) -> BatchArray:
        """Return the results of a function of batch arrays with the same rows, and other values."""
        own = [o._own if isinstance(o, BatchArray) else o for o in operands]
        reads = [o.reader() if isinstance(o, BatchArray) else o for o in operands]
        are_batches = [isinstance(o, BatchArray) for o in operands]

        def read() -> Any:
            pairs = zip(reads, are_batches, strict=True)
            return function(*(one() if is_batch else one for one, is_batch in pairs))

        return BatchArray(function(*own), self._first, len(self), read)

    def reader(self) -> Callable[[], Any]:
        """Return a function that returns all present rows, also if they change in place later."""
        own, read = self._own, self._read
        return (lambda: own) if len(own) == len(self) else read

    def __getitem__(self, index: Any) -> Any:
        if _keeps_rows(index, self.ndim):
            return self.apply(lambda rows: rows[index])
        return self.whole()[index]

    def astype(self, *arguments: Any, **options: Any) -> BatchArray:
        return self.apply(lambda rows: rows.astype(*arguments, **options))

    def clip(self, *limits: Any) -> Any:
        return combined(lambda rows, *own: rows.clip(*own), (self, *limits))

    def copy(self) -> BatchArray:
        return self.apply(lambda rows: rows.copy())

    def reshape(self, *shape: Any, **options: Any) -> Any:
        sizes = None if options else self.row_sizes(*shape)
        if sizes is None:
            return self.whole().reshape(*shape, **options)
        return self.apply(lambda rows: rows.reshape(len(rows), *sizes))

    def row_sizes(self, *shape: Any) -> list[Any] | None:
        """Return the sizes of a row in a new shape; None if rows do not remain rows."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        sizes: list[Any] = [*map(operator.index, given)]
        if sizes.count(-1) == 1:
            known = -math.prod(sizes)
            sizes[sizes.index(-1)] = math.prod(self.shape) // known if known else 0
        fits = bool(sizes) and sizes[0] == len(self) and math.prod(sizes) == math.prod(self.shape)
        return sizes[1:] if fits and math.prod(sizes) and min(sizes) >= 0 else None

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

    def __invert__(self) -> BatchArray:
        return self.apply(operator.invert)

    def _with(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        """Return the result of an operation of two operands; this array is the first one."""
        return combined(function, (self, other))

    def _change(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        """Return the result of an operation such as `/=`, which changes some types in place."""
        if not isinstance(self._own, np.ndarray) and not self._is_tensor:
            return self._with(function, other)
        read = self._read
        if self._is_tensor or not _keeps_shape(other, self.ndim):
            self._own, self._first = _copied(self.whole()), 0
        self._own = function(self._own, whole(other))
        other = _copied(other)
        self._read = lambda: function(_copied(read()), other)
        return self

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

    def __and__(self, other: Any) -> Any:
        return self._with(operator.and_, other)

    def __rand__(self, other: Any) -> Any:
        return self._with(_reflected(operator.and_), other)

    def __or__(self, other: Any) -> Any:
        return self._with(operator.or_, other)

    def __ror__(self, other: Any) -> Any:
        return self._with(_reflected(operator.or_), other)

    def __xor__(self, other: Any) -> Any:
        return self._with(operator.xor, other)

    def __rxor__(self, other: Any) -> Any:
        return self._with(_reflected(operator.xor), other)

    def __lt__(self, other: Any) -> Any:
        return self._with(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._with(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._with(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._with(operator.ge, other)

    def __eq__(self, other: object) -> Any:
        return self._with(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._with(operator.ne, other)

    def __iadd__(self, other: Any) -> Any:
        return self._change(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._change(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._change(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._change(operator.itruediv, other)

    def __ifloordiv__(self, other: Any) -> Any:
        return self._change(operator.ifloordiv, other)

    def __imod__(self, other: Any) -> Any:
        return self._change(operator.imod, other)

    def __ipow__(self, other: Any) -> Any:
        return self._change(operator.ipow, other)


def combined(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Return the result of a function of elements, as a batch array if all operands allow it.

    Args:
        function: computes each element from the elements of the operands at the same place.
        operands: arrays and numbers. At least one is a batch array.
    """
    first, *others = [operand for operand in operands if isinstance(operand, BatchArray)]
    if not all(map(first.has_rows_of, others)) or not all(
        isinstance(operand, BatchArray) or _keeps_shape(operand, first.ndim) for operand in operands
    ):
        return function(*map(whole, operands))
    # The user may change an array before all rows are read.
    return first.together(function, [*map(_copied, operands)])


def _keeps_shape(operand: Any, ndim: int) -> bool:
    """Return True if an operand is one row at most, for arrays of `ndim` axes.

    Variables and lists may change before all rows are read.
    """
    if not _is_constant(operand):
        return False
    shape = np.shape(operand)
    return len(shape) < ndim or (len(shape) == ndim and (not shape or shape[0] == 1))


def _is_constant(value: Any) -> bool:
    """Return True for numbers, and for arrays that `_copied` copies or that cannot change."""
    if isinstance(value, (bool, int, float, complex, np.generic, np.ndarray)):
        return True
    jax, tf = sys.modules.get("jax"), sys.modules.get("tensorflow")
    if jax is not None and isinstance(value, jax.Array):
        return True
    return tf is not None and isinstance(value, tf.__internal__.EagerTensor)


def _copied(value: Any) -> Any:
    """Return a copy of an array of NumPy or a tensor of PyTorch; other values themselves."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if callable(getattr(value, "clone", None)) else value


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
