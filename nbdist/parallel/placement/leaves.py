"""The arrays of a tree, each with its path, and what is wrong with those that are none."""

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


class Leaf(NamedTuple):
    """An array of a tree.

    Attributes:
        keys: to it, from the tree's root.
        value: a `jax.Array`, a NumPy array or a number.
        shape: of it.
        nbytes: that it takes on a device that holds all of it.
    """

    keys: tuple[Any, ...]
    value: Any
    shape: tuple[int, ...]
    nbytes: int

    @property
    def path(self) -> str:
        """As Python writes it, `['w'][0]`; empty where the tree is one array."""
        written: str = jax.tree_util.keystr(self.keys)
        return written

    @property
    def name(self) -> str:
        """For people: where it is in the tree, and its shape."""
        return f"{self.path or 'the array'} {list(self.shape)}"


def leaves_of(tree: Any, what: str) -> tuple[list[Leaf], jax.tree_util.PyTreeDef]:
    """The tree's arrays, in order, and its structure.

    Args:
        tree: of arrays and numbers.
        what: the function that was called, for the error.

    Raises:
        UsageError: leaves are no arrays, or were donated: each of them.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    wrong = [said for path, value in found if (said := _wrong(path, value))]
    if wrong:
        raise UsageError(f"{what} takes trees of arrays that are there: {'; '.join(wrong)}")
    return [_leaf(path, value) for path, value in found], structure


def _wrong(path: Sequence[Any], value: Any) -> str:
    """What is; nothing of an array that can be placed."""
    fault = fault_of(value)
    if not fault:
        return ""
    return f"leaf {jax.tree_util.keystr(tuple(path))} {fault}" if path else f"it {fault}"


def fault_of(value: Any) -> str:
    """Why it cannot be placed; nothing where it can."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _fault_of_numpy(np.asanyarray(value))
    if not isinstance(value, jax.Array):
        if isinstance(value, int) and _is_lost(value, value, np.int32):
            return f"is {value}, and {_WIDE}"
        number = isinstance(value, _NUMBERS)
        return "" if number else f"is a {type(value).__name__}: make it an array, or leave it out"
    if isinstance(value, jax.core.Tracer):
        return "is traced (within jax.jit or jax.grad): call it outside"
    if value.is_deleted():
        return (
            f"{list(value.shape)} is gone, donated to a function or deleted: take what that "
            "function returned"
        )
    return ""


def _fault_of_numpy(value: np.ndarray) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return "is masked, and JAX has no masks: give .filled(...), and the mask as another array"
    if value.dtype.kind in "OSUMm" or value.dtype.names or value.dtype in _TOO_LONG:
        return f"is of {value.dtype}, which JAX has not: make numbers of it, such as float32"
    short = _SHORT.get(value.dtype)
    if short and value.size and _is_lost(int(value.min()), int(value.max()), short):
        return f"has numbers from {value.min()} to {value.max()}, and {_WIDE}"
    return ""


def _is_lost(least: int, most: int, short: Any) -> bool:
    """Whether JAX, which has integers of 32 bits unless told otherwise, would cut them off."""
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
