"""A step under JAX, in global view: one jitted function over the mesh of all devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.errors import StepError
from nbdist.records import BATCH_NAME
from nbdist.worker import steps
from nbdist.worker.data import map_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh, NamedSharding

    from nbdist.records import StepRequest
    from nbdist.worker.data import Batch


class PjrtStep:
    """Carried names are donated and stay on the devices; arrays that are only read are arguments.

    Everything carried or read is replicated, the batch is split over the mesh's data axis.

    Args:
        request: the step.
        define: makes a function of a source, in the user's namespace, under the cell's name.
        namespace: the user's; carried names are taken from it and put back.
        mesh: over all devices of all ranks.
    """

    reduced = True

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        namespace: dict[str, Any],
        mesh: Mesh,
    ) -> None:
        self.replicas: int = mesh.size
        self._request = request
        self._namespace = namespace
        self._replicated = jax.NamedSharding(mesh, jax.P())
        self._by_row = jax.NamedSharding(mesh, jax.P("data"))
        carried = request.program.carried
        arrays = tuple(n for n in request.program.reads if _has_arrays(namespace[n]))
        source = steps.function_source(request, (*carried, *arrays, BATCH_NAME))
        self._body = define(source)
        self._state = _Split(tuple(namespace[name] for name in carried), self._replicated)
        self._read = _Split(tuple(namespace[name] for name in arrays), self._replicated)
        self._step = jax.jit(
            self._pure,
            donate_argnums=0,
            out_shardings=(self._replicated, [leaf.sharding for leaf in self._state.arrays]),
        )

    def step(self, batch: Batch) -> Any:
        """Begin a step; state that changes its shape or type is refused before it does harm."""
        sharding = self._replicated if batch.whole else self._by_row
        values = map_arrays(lambda array: _spread(array, sharding), batch.values)
        report, self._state.arrays = self._step(self._state.arrays, self._read.arrays, values)
        return report

    def read(self, report: Any) -> dict[str, float]:
        return {name: float(value) for name, value in report.items()}

    def finish(self) -> None:
        names = self._request.program.carried
        self._namespace.update(zip(names, self._state.tree(self._state.arrays), strict=True))

    def _pure(self, state: list[Any], read: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        report, carried = self._body(*self._state.tree(state), *self._read.tree(read), batch)
        after = _Split(carried, None)
        self._refuse_change(state, after)
        return steps.scalars(self._request, report, jnp.asarray), after.arrays

    def _refuse_change(self, before: list[Any], after: _Split) -> None:
        names = self._request.program.carried
        lines = self._request.program.carried_lines
        for i, name in enumerate(names):
            old = _described(self._state.tree(before)[i])
            new = _described(after.tree(after.arrays)[i])
            if old != new:
                raise StepError(
                    f"`{name}` (line {lines[name]}) is carried to the next step and changes: "
                    f"{_first_difference(old, new)}"
                )


class _Split:
    """A tree as its arrays, and all else.

    What is no array (a function in an Equinox module, a string) stays as it is.

    Args:
        tree: any pytree.
        sharding: where its arrays are put; None leaves them where they are.
    """

    def __init__(self, tree: Any, sharding: NamedSharding | None) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [None if _is_array(leaf) else leaf for leaf in leaves]
        found = [leaf for leaf in leaves if _is_array(leaf)]
        self.arrays = found if sharding is None else [_place(leaf, sharding) for leaf in found]

    def tree(self, arrays: list[Any]) -> Any:
        """The tree with these arrays in their places."""
        rest = iter(arrays)
        filled = [next(rest) if leaf is None else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, filled)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))


def _has_arrays(value: Any) -> bool:
    """Whether a name's value is data; numbers by themselves are constants of the program."""
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(value))


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    """Put a leaf on the mesh, unless it is there already; every rank has the same value."""
    if isinstance(leaf, jax.Array):
        if leaf.sharding.device_set == sharding.device_set:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _spread(np.asarray(jax.random.key_data(leaf)), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return _spread(np.asarray(jnp.asarray(leaf)), sharding)


def _spread(array: Any, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, np.asarray(array))


def _described(tree: Any) -> list[tuple[str, str]]:
    """Path and type of every leaf."""
    return [
        (jax.tree_util.keystr(path), str(jax.typeof(leaf)) if _is_array(leaf) else repr(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _first_difference(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> str:
    for (path, was), (other, is_now) in zip(old, new, strict=False):
        if path != other:
            return f"its structure is another ({path or 'itself'} and {other or 'itself'})"
        if was != is_now:
            return f"{path or 'it'} was {was} and is {is_now}"
    return f"its structure is another ({len(old)} leaves and {len(new)})"
