"""State of a training loop under JAX: carried names, and objects that the steps change.

The user's dicts, lists and arrays whose items the steps replace remain the same objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.worker.jax.arrays.checkpoint import check_fits, placed_like
from nbdist.worker.jax.arrays.leaves import as_data, gathered, is_array
from nbdist.worker.jax.runtime.loop_signals import signals_of_loop
from nbdist.worker.jax.step.carried import place_of
from nbdist.worker.jax.step.closures import holds_objects
from nbdist.worker.runtime import rng_alignment
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NUMBERS = (bool, int, float)
_CONTAINERS = (dict, list, np.ndarray)


class LoopState:
    """Arrays and numbers of carried names, NNX objects, the user's own objects and containers.

    Args:
        carried: values of the carried names before the first step.
        read: values of the names that the step reads and does not assign.
        mutated: names among these of dicts, lists and arrays whose items the step replaces.

    Attributes:
        carried: values of the carried names.
        is_shared: True if the state must be equal on all ranks.
        is_changed: True if the next step must begin from `carried`, not from the user's values.
        signals: records signals of training in the steps.
    """

    def __init__(
        self, carried: dict[str, Any], read: dict[str, Any], mutated: Sequence[str] = ()
    ) -> None:
        self.carried = carried
        self.is_changed = False
        self.is_shared = True
        self.signals = signals_of_loop()
        self._mutated = mutated
        self.reread(read)

    def reread(self, read: dict[str, Any]) -> None:
        """Take other values of the names that the step reads."""
        self._objects = {n: v for n, v in read.items() if _is_live(v) or _is_of_user(v)}
        mutated = {n: read[n] for n in self._mutated if n in read and n not in self._objects}
        self._containers = {n: v for n, v in mutated.items() if isinstance(v, _CONTAINERS)}

    def replicate(self) -> None:
        """Replicate arrays in containers that are split over the mesh."""
        for name, value in self._containers.items():
            _fill(value, _mapped(name, value, lambda _, leaf: gathered(leaf)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names whose values the steps change."""
        return (*self.carried, *self._objects, *self._containers)

    def saved(self) -> dict[str, Any]:
        """Return the arrays to save, by name and path."""
        return {
            path: np.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf
            for path, leaf in self.leaves().items()
        }

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the arrays by values of the same names, shapes and dtypes.

        Items that the steps have appended to lists of the user's objects are left out.

        Raises:
            StepError: Names or shapes differ.
        """
        leaves, lists = self.leaves(), tuple(self._lists())
        arrays = {n: a for n, a in arrays.items() if n in leaves or not n.startswith(lists)}
        numbers = {n: arrays[n] for n in arrays if isinstance(leaves.get(n), _NUMBERS)}
        check_fits(arrays, self.saved() | numbers)  # `v = 0` becomes an array of any shape
        self._map(lambda path, leaf: _restored(arrays[path], leaf) if path in arrays else leaf)
        self.is_changed = True

    def _lists(self) -> Iterator[str]:
        """Yield the beginnings of the paths of items in lists of the user's objects."""
        for name, value in self._objects.items():
            if not _is_live(value):
                yield from (f"{name}.{n}[" for n, v in vars(value).items() if isinstance(v, list))

    def changed(self) -> tuple[Any, ...]:
        """Return the values of the carried names for the next step."""
        self.is_changed = False
        return tuple(self.carried.values())

    def adopt(self) -> None:
        """Let JAX move arrays that the user has put on one device of this process."""
        self._map(lambda _, leaf: _uncommitted(leaf))
        self.is_changed = True

    def alike(self) -> Iterator[tuple[str, jax.Array]]:
        """Yield the arrays that must be equal on all ranks, by name and path."""
        pairs = self.leaves().items() if self.is_shared else ()
        yield from ((path, leaf) for path, leaf in pairs if isinstance(leaf, jax.Array))

    def facts(self) -> dict[str, object]:
        """Return no facts: nbdist has not changed the learning rate."""
        return {}

    def leaves(self) -> dict[str, Any]:
        """Return all arrays and numbers, by name and path."""
        found: dict[str, Any] = {}
        self._map(found.setdefault)
        return found

    def put_back(self, leaves: dict[str, Any]) -> None:
        """Restore what `leaves` returned."""
        self._map(leaves.get)

    def _map(self, function: Callable[[str, Any], Any]) -> None:
        """Replace every leaf by `function` of its path and the leaf."""
        for name, value in self._containers.items():
            _fill(value, _mapped(name, value, function))
        self.carried = {n: _mapped(n, v, function) for n, v in self.carried.items()}
        for name, value in self._objects.items():
            if _is_live(value):
                _mapped(name, value, function)
                continue
            for attribute, part in list(vars(value).items()):
                new = _mapped(f"{name}.{attribute}", part, function)
                if new is not part:
                    setattr(value, attribute, new)


class Snapshot:
    """State of a loop and of all random generators, to undo a step that fails.

    Args:
        state: state of the loop.
        namespace: names of the user; their NumPy generators belong to the snapshot.
    """

    def __init__(self, state: LoopState, namespace: dict[str, Any]) -> None:
        self._state = state
        self._leaves = state.leaves()
        arrays = [leaf for leaf in self._leaves.values() if isinstance(leaf, np.ndarray)]
        # `w -= g` changes an array in place.
        self._arrays = [(array, array.copy()) for array in arrays if array.flags.writeable]
        self._global = rng_alignment.States.now().packed()
        own = [value for value in namespace.values() if isinstance(value, np.random.Generator)]
        self._own = [(one.bit_generator, one.bit_generator.state) for one in own]

    def restore(self) -> None:
        """Restore the state and the generators."""
        self._state.put_back(self._leaves)
        for array, values in self._arrays:
            np.copyto(array, values)
        rng_alignment.restore(self._global)
        for generator, state in self._own:
            generator.state = state


def _mapped(name: str, value: Any, function: Callable[[str, Any], Any]) -> Any:
    """Return a value with other leaves; an NNX object receives them itself."""
    is_live, tree = _is_live(value), (value,)
    if is_live:
        from flax import nnx

        _, tree = nnx.split(tree, graph=True)
    try:
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    except (TypeError, ValueError):  # keys that cannot be sorted: no state of JAX
        return value
    new = [
        function(f"{name}{place_of(path)[1]}", leaf)
        if is_array(leaf) or isinstance(leaf, _NUMBERS)
        else leaf
        for path, leaf in pairs
    ]
    if all(a is b for a, (_, b) in zip(new, pairs, strict=True)):
        return value
    changed = jax.tree.unflatten(structure, new)
    if not is_live:
        return changed[0]
    nnx.update((value,), changed)
    return value


def _fill(value: Any, new: Any) -> None:
    """Replace the arrays and numbers in a dict, list or array by those of another one."""
    if new is value:
        return
    if isinstance(value, np.ndarray):
        np.copyto(value, new)
        return
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(part, (dict, list)):
            _fill(part, new[key])
        else:
            value[key] = new[key]


def _is_live(value: Any) -> bool:
    """Return True if a value contains NNX objects that change in place."""
    if not holds_objects(value):
        return False
    from nbdist.worker.jax.step.nnx_state import is_functional

    return not is_functional(value)


def _is_of_user(value: Any) -> bool:
    return is_users(type(value).__module__) and hasattr(value, "__dict__")


def _restored(saved: np.ndarray, leaf: Any) -> Any:
    if isinstance(leaf, _NUMBERS):
        is_number = saved.dtype == np.asarray(leaf).dtype and not saved.ndim
        return type(leaf)(saved.item()) if is_number else jnp.asarray(saved)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return placed_like(saved, leaf)
    return _of_process(saved, leaf)


def _uncommitted(leaf: Any) -> Any:
    is_committed = isinstance(leaf, jax.Array) and leaf.is_fully_addressable and leaf.committed
    return _of_process(as_data(leaf), leaf) if is_committed else leaf


def _of_process(values: np.ndarray, leaf: Any) -> Any:
    """Return an array like `leaf` that JAX may move to other devices."""
    if not isinstance(leaf, jax.Array):
        return np.array(values, copy=True)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(leaf))
    return jnp.asarray(values)
