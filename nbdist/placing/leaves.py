"""The arrays of a tree, each with its path, and what is wrong with those that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = (bool, int, float, complex, np.generic)


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
    fault = _fault(value)
    if not fault:
        return ""
    return f"leaf {jax.tree_util.keystr(tuple(path))} {fault}" if path else f"it {fault}"


def _fault(value: Any) -> str:
    if isinstance(value, np.ndarray):
        known = value.dtype.kind not in "OSUMm" and not value.dtype.names
        return "" if known else f"is of {value.dtype}, which JAX has not: make numbers of it"
    if not isinstance(value, jax.Array):
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


def _leaf(path: Sequence[Any], value: Any) -> Leaf:
    if isinstance(value, (jax.Array, np.ndarray)):
        shape, nbytes = value.shape, value.nbytes
    else:
        shape, nbytes = (), np.asarray(value).nbytes
    return Leaf(tuple(path), value, shape, nbytes)
