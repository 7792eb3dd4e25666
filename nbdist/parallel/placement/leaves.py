"""Arrays of a tree with their paths, and faults of other leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = (bool, int, float, complex, np.generic)
_SHORT: dict[np.dtype, Any] = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
_TOO_LONG = (np.dtype(np.longdouble), np.dtype(np.clongdouble))
_WIDE = (
    "JAX's integers have 32 bits: take smaller ones, or "
    'jax.config.update("jax_enable_x64", True) before anything is made'
)

GONE = "was donated to a function or deleted: use the array that the function returned"
"""Fault of an array that was deleted."""


class Leaf(NamedTuple):
    """An array of a tree.

    Attributes:
        keys: path from the tree's root.
        value: a `jax.Array`, a NumPy array or a number.
        shape: shape of the array.
        nbytes: bytes of the whole array.
    """

    keys: tuple[Any, ...]
    value: Any
    shape: tuple[int, ...]
    nbytes: int

    @property
    def path(self) -> str:
        """Path as Python code, `['w'][0]`; empty if the tree is one array."""
        written: str = jax.tree_util.keystr(self.keys)
        return written

    @property
    def name(self) -> str:
        """Path and shape for messages."""
        return f"{self.path or 'the array'} {list(self.shape)}"


def leaves_of(tree: Any, what: str) -> tuple[list[Leaf], jax.tree_util.PyTreeDef]:
    """Return the tree's arrays in order, and its structure.

    Args:
        tree: arrays and numbers.
        what: name of the called function, for errors.

    Raises:
        UsageError: leaves are not arrays or were donated; all are listed.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    wrong = [reason for path, value in found if (reason := _wrong(path, value))]
    if wrong:
        raise UsageError(f"{what} accepts trees of arrays: {'; '.join(wrong)}")
    return [_leaf(path, value) for path, value in found], structure


def _wrong(path: Sequence[Any], value: Any) -> str:
    """Return the fault of a leaf with its path; empty if it can be placed."""
    fault = fault_of(value)
    if not fault:
        return ""
    return f"leaf {jax.tree_util.keystr(tuple(path))} {fault}" if path else f"it {fault}"


def fault_of(value: Any) -> str:
    """Return why a leaf cannot be placed; empty if it can."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _fault_of_numpy(np.asanyarray(value))
    if not isinstance(value, jax.Array):
        if isinstance(value, int) and _is_lost(value, value, np.int32):
            return f"is {value}, and {_WIDE}"
        number = isinstance(value, _NUMBERS)
        kind = type(value).__name__
        return "" if number else f"has type {kind}: convert it to an array, or remove it"
    if isinstance(value, jax.core.Tracer):
        return "is traced (within jax.jit or jax.grad): call it outside"
    return f"{list(value.shape)} {GONE}" if value.is_deleted() else ""


def _fault_of_numpy(value: np.ndarray) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return (
            "is masked, which JAX does not support: give .filled(...), and the mask "
            "as another array"
        )
    if value.dtype.kind in "OSUMm" or value.dtype.names or value.dtype in _TOO_LONG:
        return (
            f"is of {value.dtype}, which JAX does not support: convert it to numbers, "
            "such as float32"
        )
    short = _SHORT.get(value.dtype)
    if short and value.size and _is_lost(int(value.min()), int(value.max()), short):
        return f"has numbers from {value.min()} to {value.max()}, and {_WIDE}"
    return ""


def _is_lost(least: int, most: int, short: Any) -> bool:
    """Return True if JAX would truncate integers, which have 32 bits unless x64 is enabled."""
    if jax.config.read("jax_enable_x64"):
        return False
    bounds = np.iinfo(short)
    return bool(least < bounds.min or most > bounds.max)


def _leaf(path: Sequence[Any], value: Any) -> Leaf:
    if isinstance(value, (jax.Array, np.ndarray)):
        shape, nbytes = value.shape, value.nbytes
    else:
        shape, nbytes = (), np.asarray(value).nbytes
    return Leaf(tuple(path), value, shape, nbytes)
