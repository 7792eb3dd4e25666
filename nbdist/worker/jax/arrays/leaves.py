"""Leaves of the state that a step carries: arrays on the mesh and constants of the program.

A number is a constant until a step changes it. A counter is therefore carried, and a module's
`inference=False` stays a constant.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import NamedSharding

_NUMBERS = (bool, int, float, complex, np.generic)
_HOLE = object()
"""Marks the position of an array among the constants."""


class Leaves:
    """Arrays and constants of a flattened value, in the order of the leaves.

    Attributes:
        arrays: Leaves that are arrays.

    Args:
        leaves: Leaves before the first step.
        refuse: Makes the error for a leaf that changes, from its index and the change.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        refuse: Callable[[int, str], StepError] = lambda index, how: StepError(f"{index} {how}"),
    ) -> None:
        self._refuse = refuse
        self._constants = [_HOLE if is_array(leaf) else leaf for leaf in leaves]
        self._becoming: dict[int, jax.core.ShapedArray] = {}
        self._settled = False
        self.arrays = [raw(leaf) for leaf in leaves if is_array(leaf)]

    def filled(self, arrays: Sequence[Any]) -> list[Any]:
        """Return all leaves, with the given arrays in their positions."""
        rest = iter(arrays)
        return [next(rest) if leaf is _HOLE else leaf for leaf in self._constants]

    def of_arrays(self, each: Sequence[Any]) -> list[Any]:
        """Return the items that belong to arrays, given one item per leaf."""
        pairs = zip(each, self._constants, strict=True)
        return [thing for thing, constant in pairs if constant is _HOLE]

    def collect(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Return the arrays among the leaves `after` a step, with the dtypes of those `before` it.

        Raises:
            StepError: A leaf changes its shape or type.
        """
        arrays = []
        for index, (old, new) in enumerate(zip(self.filled(before), after, strict=True)):
            if self._constants[index] is _HOLE:
                arrays.append(self._fitted(index, old, new))
            elif not _is_same(old, new):
                self._change(index, old, new)
        return arrays

    @property
    def is_settled(self) -> bool:
        """True if the last traced step changed no number."""
        return not self._becoming

    def settle(self) -> bool:
        """Convert the numbers that changed to arrays; returns False if none changed."""
        leaves = self.filled(self.arrays)
        for index, seen in self._becoming.items():
            number = jnp.asarray(leaves[index])
            leaves[index] = number if seen.weak_type else number.astype(seen.dtype)
            self._constants[index] = _HOLE
        self.arrays = [
            leaf
            for leaf, constant in zip(leaves, self._constants, strict=True)
            if constant is _HOLE
        ]
        self._settled = not self._becoming
        self._becoming = {}
        return not self._settled

    def _fitted(self, index: int, old: Any, new: Any) -> Any:
        """Return the new leaf with the old leaf's type, if the conversion is lossless."""
        if not is_array(new) and not isinstance(new, _NUMBERS):
            raise self._refuse(index, f"changes from {described(old)} to {described(new)}")
        was, now = jax.typeof(old), jax.typeof(jnp.asarray(new))
        if (was.shape, was.dtype, was.weak_type) == (now.shape, now.dtype, now.weak_type):
            return jnp.asarray(new)
        if was.shape == now.shape and now.weak_type and _reaches(now, was):
            return jnp.asarray(new, was.dtype)
        self._change(index, old, new)
        return old

    def _change(self, index: int, old: Any, new: Any) -> None:
        """Record the new type of a number, or of an array made of one.

        Raises:
            StepError: The leaf cannot change its type.
        """
        number = isinstance(old, _NUMBERS) or (is_array(old) and jax.typeof(old).weak_type)
        if not self._settled and number and (is_array(new) or isinstance(new, _NUMBERS)):
            was, now = jax.typeof(jnp.asarray(old)), jax.typeof(jnp.asarray(new))
            if was.shape == now.shape and _reaches(was, now):
                self._becoming[index] = now
                return
        raise self._refuse(index, f"changes from {described(old)} to {described(new)}")


def is_array(leaf: Any) -> bool:
    """Return True if a leaf is data for JAX, or a `ShapeDtypeStruct` for planning."""
    if isinstance(leaf, np.ndarray):
        return bool(jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_)
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def described(leaf: Any) -> str:
    """Describe an array by its JAX type, and any other leaf by its `repr`."""
    return str(jax.typeof(leaf)) if is_array(leaf) else repr(leaf)


def raw(leaf: Any) -> Any:
    """Return an array with a dtype that JAX supports."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Place an array on the mesh; every rank passes the same value.

    Raises:
        StepError: The leaf has a shape but no data.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise StepError(
            f"the step has an array of {described(leaf)} without data (jax.eval_shape makes such "
            "arrays): it can only be planned, with %%dist_plan"
        )
    if isinstance(leaf, jax.Array):
        if leaf.sharding.device_set == sharding.device_set:
            return _moved(leaf, sharding)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = spread(np.asarray(jax.random.key_data(leaf)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if not leaf.committed and sharding.is_fully_replicated:
            return _shared(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _shared(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return an array of this process as a part of a replicated one; they share the buffer."""
    if leaf.weak_type:
        return jax.jit(lambda whole: whole, out_shardings=sharding)(leaf)
    pieces = [
        leaf if leaf.device == device else jax.device_put(leaf, device)
        for device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)


def _moved(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.jit(lambda whole: whole, out_shardings=sharding)(leaf)


def gathered(array: Any) -> Any:
    """Replicate an array on every device if it is sharded over processes. Collective."""
    if not is_spread(array):
        return array
    everywhere = jax.NamedSharding(array.sharding.mesh, jax.P())
    return _replicating(everywhere)(array)


@functools.cache
def _replicating(everywhere: NamedSharding) -> Callable[[Any], Any]:
    """Return the identity with this sharding. JAX compiles it once for each shape."""
    identity: Callable[[Any], Any] = jax.jit(lambda whole: whole, out_shardings=everywhere)
    return identity


def is_spread(array: Any) -> bool:
    """Return True if an array is sharded over processes, so that no process has all of it."""
    return isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    )


def is_own(leaf: Any) -> bool:
    """Return True if a leaf is an array of this process alone."""
    if isinstance(leaf, jax.Array):
        return bool(leaf.is_fully_addressable)
    return isinstance(leaf, np.ndarray)


def as_data(leaf: Any) -> np.ndarray:
    """Convert an array of this process to NumPy; random keys become their data."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def spread(array: Any, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, np.asarray(array))


class Spread:
    """Variant of `spread` for many arrays of few shapes: agrees once on each global shape.

    Args:
        sharding: Sharding of the results: replicated, or split by rows.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._shapes: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}

    def __call__(self, array: Any) -> jax.Array:
        local = np.asarray(array)
        if local.shape not in self._shapes:
            made = spread(local, self._sharding)
            self._shapes[local.shape] = made.shape, _first_row(made)
            return made
        shape, first = self._shapes[local.shape]

        def rows(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            return local[start - first : stop - first]

        return jax.make_array_from_callback(shape, self._sharding, rows)


def _first_row(array: jax.Array) -> int:
    """Return the index of this process's first row."""
    places = array.sharding.addressable_devices_indices_map(array.shape).values()
    return min(index[0].start or 0 for index in places)


def _reaches(was: Any, now: Any) -> bool:
    """Return True if the dtype of `now` can represent every value of `was`."""
    return bool(was.dtype == now.dtype or jnp.promote_types(was.dtype, now.dtype) == now.dtype)


def _is_same(old: Any, new: Any) -> bool:
    """Return True if two constants are identical objects, or equal numbers or strings."""
    if old is new:
        return True
    plain = (*_NUMBERS, str, bytes)
    return type(old) is type(new) and isinstance(old, plain) and bool(old == new)
