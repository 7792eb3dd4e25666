"""State of a training loop under JAX: carried names, and objects that the steps change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.worker.jax.arrays.checkpoint import check_fits, placed_like
from nbdist.worker.jax.arrays.leaves import as_data, is_array
from nbdist.worker.jax.runtime.loop_signals import signals_of_loop
from nbdist.worker.jax.step.carried import place_of
from nbdist.worker.jax.step.closures import holds_objects
from nbdist.worker.runtime import rng_alignment
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NUMBERS = (bool, int, float)


class LoopState:
    """Arrays and numbers of the carried names, of NNX objects, and of the user's own objects.

    Args:
        carried: values of the carried names before the first step.
        read: values of the names that the step reads and does not assign.

    Attributes:
        carried: values of the carried names.
        is_shared: True if the state must be equal on all ranks.
        is_changed: True if the next step must begin from `carried`, not from the user's values.
        signals: records signals of training in the steps.
    """

    def __init__(self, carried: dict[str, Any], read: dict[str, Any]) -> None:
        self.carried = carried
        self.is_changed = False
        self.is_shared = True
        self.signals = signals_of_loop()
        self._objects = {n: v for n, v in read.items() if _is_live(v) or _is_of_user(v)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names whose values the steps change."""
        return (*self.carried, *self._objects)

    def saved(self) -> dict[str, Any]:
        """Return the arrays to save, by name and path."""
        return {
            path: np.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf
            for path, leaf in self.leaves().items()
        }

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the arrays by values of the same names, shapes and dtypes.

        Raises:
            StepError: Names or shapes differ.
        """
        check_fits(arrays, self.saved())
        self._map(lambda path, leaf: _restored(arrays[path], leaf) if path in arrays else leaf)
        self.is_changed = True

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
        self._global = rng_alignment.States.now().packed()
        own = [value for value in namespace.values() if isinstance(value, np.random.Generator)]
        self._own = [(one.bit_generator, one.bit_generator.state) for one in own]

    def restore(self) -> None:
        """Restore the state and the generators."""
        self._state.put_back(self._leaves)
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
        return type(leaf)(saved.item())
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
