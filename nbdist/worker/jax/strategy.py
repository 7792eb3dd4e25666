"""Strategy of JAX: one mesh over every device, with the methods of `tf.distribute.Strategy`."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.private_api import jax as private_jax
from nbdist.private_api import keras as private_keras
from nbdist.worker.jax.arrays.distributed_dataset import (
    DistributedDataset,
    GlobalSource,
    InputContext,
    PartSource,
    Placement,
)
from nbdist.worker.jax.arrays.replicas import PerReplica, Ragged, Runner
from nbdist.worker.jax.runtime import cluster_resolver, platforms
from nbdist.worker.keras import untested
from nbdist.worker.runtime import import_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nbdist.planner.cost.time import Target
    from nbdist.records import Bench


class PjRTStrategy:
    """Strategy of JAX with the methods of `tf.distribute.Strategy`.

    Its mesh contains all devices of all processes. In a plain script these are the devices of this
    process.

    Args:
        resolver: Expected size: a TensorFlow cluster resolver, `{"hosts": 4,
            "devices_per_host": 8}` or `(4, 8)`. Default: no check.

    Attributes:
        mesh: `jax.sharding.Mesh` with one axis `data` over all devices, in the order of processes.
        outer_mesh: Context mesh outside of an open scope; None without a scope.

    Raises:
        StrategyError: The number of processes or devices is not that of `resolver`.

    Examples:
        >>> strategy = nbdist.PjRTStrategy()
        >>> strategy.num_replicas_in_sync
        8
        >>> batch = nbdist.place(jnp.arange(16.0), "batch", mesh=strategy.mesh)
        >>> sums = strategy.run(lambda rows: rows.sum(), args=(batch,))  # 2 rows on each replica
        >>> float(strategy.reduce("SUM", sums))
        120.0
    """

    def __init__(self, resolver: object = None) -> None:
        if resolver is not None:
            cluster_resolver.check(resolver)
        devices = np.array(platforms.by_process(jax.devices()), dtype=object)
        self.mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        self._placement = Placement(self.mesh)
        self._runner = Runner(self.mesh)
        self._sharded: dict[int, weakref.ref[jax.Array]] = {}
        self._bench: Bench | None = None
        self.outer_mesh: jax.sharding.Mesh | None = None

    @functools.cached_property
    def target(self) -> Target:
        """Devices for which steps are planned; the first access is collective.

        It measures devices that are in no table, such as those of an unknown plugin.
        """
        from nbdist.planner.hardware.lookup import find
        from nbdist.worker.planning.plan_step import live_target, local_devices

        devices = local_devices()
        if self._bench is None and find(devices[0].kind) is None:
            from nbdist.worker.profiling.device_bench import measure

            self._bench = measure(self.mesh, devices)
        return live_target(devices, self._bench)

    def take_bench(self, bench: Bench | None) -> None:
        """Use these measurements of the devices in later plans."""
        self._bench = bench
        self.__dict__.pop("target", None)

    def note_sharded(self, arrays: Iterable[jax.Array]) -> None:
        """Record that a plan sharded these arrays; a later plan may change their sharding."""
        self._sharded = {place: held for place, held in self._sharded.items() if held() is not None}
        self._sharded |= {id(array): weakref.ref(array) for array in arrays}

    def has_sharded(self, array: jax.Array) -> bool:
        """Return True if a plan, not the user, sharded an array."""
        held = self._sharded.get(id(array))
        return held is not None and held() is array

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of devices that the data axis spans."""
        size: int = self.mesh.size
        return size

    @contextlib.contextmanager
    def scope(self) -> Iterator[PjRTStrategy]:
        """Use this mesh for `jax.jit` and `jax.P`, and let Keras on JAX train over it.

        On exit the previous mesh is restored. Scopes may be nested.
        """
        self.outer_mesh = jax.sharding.get_mesh()
        try:
            with jax.set_mesh(self.mesh), self.keras_scope():
                yield self
        finally:
            self.outer_mesh = None

    @contextlib.contextmanager
    def keras_scope(self) -> Iterator[PjRTStrategy]:
        """Let Keras on JAX train over this mesh, without a context mesh for other code."""
        with contextlib.ExitStack() as scopes:
            open_scope = scopes, self._placement
            _scopes.append(open_scope)
            try:
                if "keras" in sys.modules:
                    _enter_keras(scopes, self._placement)
                else:
                    _enter_once_imported()
                yield self
                jax.effects_barrier()  # wait for the effects of callbacks before the cell ends
            finally:
                _scopes.remove(open_scope)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `fn` once on each replica, on all replicas at the same time.

        A replica receives its own rows of arrays that are sharded over the mesh, such as the
        batches of this strategy's datasets. It receives its own value of an earlier result of
        `run`. It receives the whole of any other value.

        `fn` may use collectives such as `jax.lax.psum(x, "data")`. The compiled function is reused
        while `fn` and the objects that it reads from outside are the same: pass changing values as
        arguments.

        Returns:
            Result of `fn`; each leaf contains one value per replica.
        """
        return self._runner.run(fn, tuple(args), dict(kwargs or {}))

    def reduce(self, reduce_op: object, value: Any, axis: int | None = None) -> Any:
        """Combine the replicas' values; the result is replicated on every device.

        Args:
            reduce_op: `SUM` or `MEAN`, or TensorFlow's `ReduceOp`.
            value: Result of `run`.
            axis: Additional axis of each replica's value to reduce, usually the axis of samples
                (0).
        """
        return self._runner.reduce(reduce_op, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas; `(value,)` if it is not per replica."""
        return value.local() if isinstance(value, (PerReplica, Ragged)) else (value,)

    def experimental_distribute_dataset(
        self, dataset: object, options: object = None
    ) -> DistributedDataset:
        """Split the global batches of a dataset that is the same on every process.

        Args:
            dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset`, or a list of batches.
            options: Ignored; accepted for compatibility with TensorFlow.

        Raises:
            StrategyError: `dataset` is not a dataset.
        """
        del options
        return DistributedDataset(GlobalSource(dataset, self._placement), self._placement)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: object = None
    ) -> DistributedDataset:
        """Make global batches of parts that each process loads itself.

        A step uses one element for each device of the process: set the batch size to
        `ctx.get_per_replica_batch_size(global_batch_size)`, as under TensorFlow.

        Args:
            dataset_fn: Returns the part of a process for an `InputContext`. If it returns an
                iterator, it is called again for every pass.
            options: Ignored; accepted for compatibility with TensorFlow.

        Raises:
            StrategyError: `dataset_fn` did not return a dataset.
        """
        del options
        context = InputContext(
            num_input_pipelines=self._placement.rank_rows.ranks,
            input_pipeline_id=self._placement.rank_rows.rank,
            num_replicas_in_sync=self.num_replicas_in_sync,
        )
        source = PartSource(lambda: dataset_fn(context), self._placement)
        return DistributedDataset(source, self._placement)


_scopes: list[tuple[contextlib.ExitStack, Placement]] = []
"""Open scopes, in which the user may import Keras later."""


@functools.cache
def _enter_once_imported() -> None:
    import_hooks.once_imported("keras", _enter_open_scopes)


def _enter_open_scopes() -> None:
    for scopes, placement in _scopes:
        _enter_keras(scopes, placement)


def _enter_keras(scopes: contextlib.ExitStack, placement: Placement) -> None:
    keras = sys.modules["keras"]
    needed = (private_keras.FIT, private_keras.PJRT_FIT, private_jax.FIT)
    if keras.backend.backend() == "jax" and untested.accepts(keras, *needed):
        from nbdist.worker.jax.keras import distribution as keras_distribution

        scopes.enter_context(keras_distribution.scope(placement))
