"""The leaves of what a step carries: arrays on the mesh, and constants of the program.

A number is a constant until the step is seen to change it: so a counter is carried, and a module's
`inference=False` is not.
"""

from __future__ import annotations

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
"""Stands among the constants where an array belongs."""


class Leaves:
    """Leaves in their order.

    Attributes:
        arrays: those that are arrays.

    Args:
        leaves: as they are before the first step.
        refuse: makes the error for a leaf that changes, by its index and how it does.
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
        """All leaves, with these arrays in their places."""
        rest = iter(arrays)
        return [next(rest) if leaf is _HOLE else leaf for leaf in self._constants]

    def of_arrays(self, each: Sequence[Any]) -> list[Any]:
        """Of something for each leaf, what belongs to arrays."""
        pairs = zip(each, self._constants, strict=True)
        return [thing for thing, constant in pairs if constant is _HOLE]

    def collect(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """The arrays among the leaves `after` a step, with the types of those `before` it.

        Raises:
            StepError: a leaf changes its shape or type.
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
        """Whether the last step that was traced changed no number."""
        return not self._becoming

    def settle(self) -> bool:
        """Make arrays of the numbers that were seen to change; False once there are none."""
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
        """The new leaf with the old one's type, if that loses nothing."""
        if not is_array(new) and not isinstance(new, _NUMBERS):
            raise self._refuse(index, f"was {described(old)} and is {described(new)}")
        was, now = jax.typeof(old), jax.typeof(jnp.asarray(new))
        if (was.shape, was.dtype, was.weak_type) == (now.shape, now.dtype, now.weak_type):
            return jnp.asarray(new)
        if was.shape == now.shape and now.weak_type and _reaches(now, was):
            return jnp.asarray(new, was.dtype)
        self._change(index, old, new)
        return old

    def _change(self, index: int, old: Any, new: Any) -> None:
        """A number, or an array made of one alone, may take the type that a step gives it."""
        number = isinstance(old, _NUMBERS) or (is_array(old) and jax.typeof(old).weak_type)
        if not self._settled and number and (is_array(new) or isinstance(new, _NUMBERS)):
            was, now = jax.typeof(jnp.asarray(old)), jax.typeof(jnp.asarray(new))
            if was.shape == now.shape and _reaches(was, now):
                self._becoming[index] = now
                return
        raise self._refuse(index, f"was {described(old)} and is {described(new)}")


def is_array(leaf: Any) -> bool:
    """Whether it is data that JAX can hold, or the outline of some, to plan with."""
    if isinstance(leaf, np.ndarray):
        return bool(jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_)
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def described(leaf: Any) -> str:
    """An array's type as JAX writes it, anything else as it is."""
    return str(jax.typeof(leaf)) if is_array(leaf) else repr(leaf)


def raw(leaf: Any) -> Any:
    """An array as it is, of a type that JAX has."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """The array on the mesh. Every rank has the same value.

    Raises:
        StepError: it has a shape and no data.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise StepError(
            f"the step has an array of {described(leaf)} without data, as jax.eval_shape makes it: "
            "it can be planned, with %%dist_plan, and not be run"
        )
    if isinstance(leaf, jax.Array):
        if leaf.sharding.device_set == sharding.device_set:
            return _moved(leaf, sharding)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = spread(np.asarray(jax.random.key_data(leaf)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _moved(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return jax.jit(lambda whole: whole, out_shardings=sharding)(leaf)


def gathered(array: jax.Array) -> jax.Array:
    """The array whole on every device, where it is cut over processes; all ranks have to."""
    if not is_spread(array):
        return array
    everywhere = jax.NamedSharding(array.sharding.mesh, jax.P())
    return jax.jit(lambda whole: whole, out_shardings=everywhere)(array)


def is_spread(array: jax.Array) -> bool:
    """Whether no process has all of it."""
    return not (array.is_fully_addressable or array.is_fully_replicated)


def is_own(leaf: Any) -> bool:
    """Whether it is an array of this process alone."""
    if isinstance(leaf, jax.Array):
        return bool(leaf.is_fully_addressable)
    return isinstance(leaf, np.ndarray)


def as_data(leaf: Any) -> np.ndarray:
    """An array of this process as NumPy's; of random keys their data."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def spread(array: Any, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, np.asarray(array))


class Spread:
    """What `spread` does, for many arrays of few shapes: the global shape is found out once each.

    Args:
        sharding: replicated, or cut by rows.
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
    """Of those that this process has."""
    places = array.sharding.addressable_devices_indices_map(array.shape).values()
    return min(index[0].start or 0 for index in places)


def _reaches(was: Any, now: Any) -> bool:
    """Whether the one type's values can be held by the other."""
    return bool(was.dtype == now.dtype or jnp.promote_types(was.dtype, now.dtype) == now.dtype)


def _is_same(old: Any, new: Any) -> bool:
    """Constants are the same objects, or equal numbers or texts; arrays never equal one."""
    if old is new:
        return True
    plain = (*_NUMBERS, str, bytes)
    return type(old) is type(new) and isinstance(old, plain) and bool(old == new)
