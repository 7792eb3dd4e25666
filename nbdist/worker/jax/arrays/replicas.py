"""`run` and `reduce`: call a function on each replica, and combine the results.

Replica i is the i-th device of the mesh. The results are stacked in one global array whose first
axis counts replicas (`PerReplica`). If the replicas' batches differ in size, their results may
differ in shape and stay separate (`Ragged`).
"""

from __future__ import annotations

from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nbdist.errors import StrategyError
from nbdist.worker.jax.arrays.distributed_dataset import Uneven
from nbdist.worker.jax.runtime import processes
from nbdist.worker.runtime.reachable import code_names

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT_PROGRAMS = 16


class PerReplica:
    """One value for each replica, all of the same shape.

    Attributes:
        stacked: `jax.Array` of shape `(replicas, *shape)`, one row on each device.
    """

    def __init__(self, stacked: jax.Array) -> None:
        self.stacked = stacked

    def local(self) -> tuple[np.ndarray, ...]:
        """Return the values of this process's replicas.

        They are NumPy arrays: inside a mesh, JAX accepts no array that is on one of its devices.
        """
        return tuple(np.asarray(data)[0] for data in _local_rows(self.stacked))

    def __repr__(self) -> str:
        shape, replicas = self.stacked.shape[1:], len(self.stacked)
        return f"PerReplica({replicas} x {self.stacked.dtype}{list(shape)})"


class Ragged:
    """One value for each replica of this process; shapes may differ in the first axis."""

    def __init__(self, values: tuple[np.ndarray, ...]) -> None:
        self._values = values

    def local(self) -> tuple[np.ndarray, ...]:
        """Return the values of this process's replicas."""
        return self._values

    def __repr__(self) -> str:
        return f"Ragged({[value.shape for value in self._values]})"


class Runner:
    """Runner of functions on every replica of a mesh; reduces their results.

    Args:
        mesh: Mesh with the single axis `data`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._programs: list[_Program] = []
        whole = jax.NamedSharding(mesh, jax.P())
        self._fold = jax.jit(_fold, static_argnames=("op", "axes"), out_shardings=whole)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `fn` on every replica; each leaf of the result is `PerReplica` or `Ragged`."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise StrategyError(
                "strategy.run was called inside jax.jit, and cannot tell which values are per "
                "replica: call it outside of jax.jit; it compiles the function itself"
            )
        if any(isinstance(leaf, (Uneven, Ragged)) for leaf in leaves):
            return self._one_by_one(fn, leaves, tree)
        leaves = [self._on_mesh(leaf) for leaf in leaves]
        stacked = self._program(fn, leaves, tree)(
            *(
                leaf.stacked if isinstance(leaf, PerReplica) else leaf
                for leaf in leaves
                if _spec(leaf) is not None
            )
        )
        return jax.tree.map(PerReplica, stacked)

    def reduce(self, op: object, value: Any, axis: int | None) -> Any:
        """Reduce every leaf over the replicas, and over `axis` of each value if it is given."""
        name = str(op).rsplit(".", 1)[-1].upper()
        if name not in ("SUM", "MEAN"):
            raise StrategyError(f"reduce({op!r}, ...): choose 'SUM' or 'MEAN'")
        return jax.tree.map(lambda leaf: self._reduce(name, leaf, axis), value)

    def _reduce(self, op: str, leaf: Any, axis: int | None) -> Any:
        if isinstance(leaf, PerReplica):
            axes = (0,) if axis is None else (0, axis % (leaf.stacked.ndim - 1) + 1)
            return self._fold(leaf.stacked, op=op, axes=axes)
        if isinstance(leaf, Ragged):
            return _reduce_ragged(op, leaf, axis)
        if axis is not None and _spec(leaf) not in (None, jax.P()):
            return self._fold(leaf, op=op, axes=(axis,))
        if op == "MEAN" and axis is None:
            return leaf
        raise StrategyError(
            f"reduce({op!r}, ...) of a {type(leaf).__name__} that is not per replica: pass the "
            "result of strategy.run"
        )

    def _program(self, fn: Callable[..., Any], leaves: list[Any], tree: Any) -> Callable[..., Any]:
        """Return `fn` compiled over the mesh; reused while it reads the same objects."""
        fixed = tuple(leaf if _spec(leaf) is None else None for leaf in leaves)
        read = (fn, *_captured(fn), *fixed)
        form = (tree, tuple(_spec(leaf) for leaf in leaves), tuple(map(type, leaves)))
        for known in self._programs:
            if known.form == form and _same(known.read, read):
                return known.call
        call = self._compile(fn, leaves, tree)
        self._programs = [_Program(form, read, call), *self._programs[: _KEPT_PROGRAMS - 1]]
        return call

    def _compile(self, fn: Callable[..., Any], leaves: list[Any], tree: Any) -> Callable[..., Any]:
        specs = [_spec(leaf) for leaf in leaves]
        owned = [isinstance(leaf, PerReplica) for leaf in leaves]
        fixed = [leaf if spec is None else None for leaf, spec in zip(leaves, specs, strict=True)]

        def on_replica(*arrays: Any) -> Any:
            rest = iter(arrays)
            filled = list(fixed)
            for i, spec in enumerate(specs):
                if spec is not None:
                    array = next(rest)
                    filled[i] = array[0] if owned[i] else array
            args, kwargs = jax.tree.unflatten(tree, filled)
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], fn(*args, **kwargs))

        # Without the check, each replica's gradient is its own, as in TensorFlow. With it,
        # shard_map sums the gradients of replicated parameters.
        call: Callable[..., Any] = jax.jit(
            jax.shard_map(
                on_replica,
                mesh=self._mesh,
                in_specs=tuple(spec for spec in specs if spec is not None),
                out_specs=jax.P("data"),
                check_vma=False,
            )
        )
        return call

    def _on_mesh(self, leaf: Any) -> Any:
        """Copy an array to the host if it is committed to devices of this process only."""
        local = isinstance(leaf, jax.Array) and leaf.committed
        if local and leaf.sharding.device_set != set(self._mesh.devices.flat):
            return np.asarray(leaf)
        return leaf

    def _one_by_one(self, fn: Callable[..., Any], leaves: list[Any], tree: Any) -> Any:
        """Call `fn` on each local device: parts of different sizes need different programs."""
        results = []
        for i, device in enumerate(self._mesh.local_devices):
            args, kwargs = jax.tree.unflatten(tree, [_own(leaf, i, device) for leaf in leaves])
            alone = Mesh(np.array([device]), ("data",))
            try:
                with jax.set_mesh(alone), jax.default_device(device):
                    results.append(fn(*args, **kwargs))
            except NameError as error:
                if "unbound axis name" not in str(error):
                    raise
                raise StrategyError(
                    "this batch cannot be split evenly over the replicas, and the function uses a "
                    "collective: choose a batch size without remainder, or reduce with "
                    "strategy.reduce"
                ) from None
        return jax.tree.map(lambda *own: Ragged(tuple(map(np.asarray, own))), *results)


class _Program(NamedTuple):
    """Compiled function.

    Attributes:
        form: Structure, specs and types of the arguments, compared by value.
        read: Objects that the function reads, compared by identity.
        call: Function of the arrays.
    """

    form: tuple[Any, ...]
    read: tuple[Any, ...]
    call: Callable[..., Any]


def _fold(array: jax.Array, op: str, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(array, axes) if op == "SUM" else jnp.mean(array, axes)


def _reduce_ragged(op: str, leaf: Ragged, axis: int | None) -> jax.Array:
    values: list[Any] = list(leaf.local())
    if axis is not None:
        counts = sum(value.shape[axis] for value in values)
        values = [value.sum(axis) for value in values]
    else:
        counts = len(values)
    shapes = processes.agree(
        [dimension for value in values for dimension in (value.ndim, value.size)]
    )
    if len(set(map(tuple, shapes.reshape(-1, 2).tolist()))) > 1:
        raise StrategyError(
            "the replicas' values have different shapes, since the batch cannot be split evenly: "
            "reduce them over the axis of the samples (axis=0)"
        )
    totals, number = processes.gather((np.sum(values, axis=0), np.float32(counts)))
    total = jnp.sum(jnp.asarray(totals), axis=0)
    return total if op == "SUM" else total / number.sum()


def _spec(leaf: Any) -> Any:
    """Return the partition spec of an argument; None if it is no array and is passed as it is."""
    if isinstance(leaf, PerReplica):
        return jax.P("data")
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, jax.NamedSharding):
        return jax.P() if leaf.is_fully_replicated else jax.P("data")
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex)):
        return jax.P()
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return jax.P()
    return None


def _own(leaf: Any, i: int, device: jax.Device) -> Any:
    """Return the part of the i-th local replica."""
    if isinstance(leaf, Uneven):
        return jax.device_put(leaf.parts[i], device)
    if isinstance(leaf, (PerReplica, Ragged)):
        return jax.device_put(leaf.local()[i], device)
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, jax.NamedSharding):
        return _local_rows(leaf)[i]
    return leaf


def _local_rows(array: jax.Array) -> list[jax.Array]:
    """Return this process's shards in the order of its devices."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [shard.data for shard in shards]


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _captured(fn: Callable[..., Any]) -> list[Any]:
    """List the objects that a user's function, and the functions that it calls, capture."""
    found: list[Any] = []
    waiting, seen = [fn], set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        values = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        names = code_names(function.__code__)
        values += [function.__globals__[name] for name in names if name in function.__globals__]
        found += values
        scope = function.__globals__
        waiting += [v for v in values if isinstance(v, FunctionType) and v.__globals__ is scope]
    return found


def _filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
