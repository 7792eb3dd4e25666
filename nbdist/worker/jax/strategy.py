"""The strategy of JAX: one mesh over every device, with the verbs of `tf.distribute.Strategy`."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.arrays.distributed_dataset import (
    DistributedDataset,
    GlobalSource,
    InputContext,
    PartSource,
    Placement,
)
from nbdist.worker.jax.arrays.replicas import PerReplica, Ragged, Runner
from nbdist.worker.jax.runtime import cluster_resolver
from nbdist.worker.runtime import import_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nbdist.planner.cost.time import Target
    from nbdist.records import Bench


class PjRTStrategy:
    """Every device of every process in one mesh; in a plain script, those of this process.

    Args:
        resolver: what the mesh has to be: a TensorFlow cluster resolver, `{"hosts": 4,
            "devices_per_host": 8}` or `(4, 8)`. Left out, whatever there is.

    Attributes:
        mesh: `jax.sharding.Mesh` with the axis `data` over all devices, in global view.

    Raises:
        StrategyError: the live processes and devices are others than `resolver` says.
    """

    def __init__(self, resolver: object = None) -> None:
        if resolver is not None:
            cluster_resolver.check(resolver)
        self.mesh = jax.make_mesh(
            (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        self._placement = Placement(self.mesh)
        self._runner = Runner(self.mesh)
        self._sharded: dict[int, weakref.ref[jax.Array]] = {}
        self._bench: Bench | None = None

    @functools.cached_property
    def target(self) -> Target:
        """What steps are planned for; every process has to ask for the first time.

        Devices that are in no table, as those of a plugin that nobody knows, are measured then.
        """
        from nbdist.planner.hardware.lookup import find
        from nbdist.worker.planning.plan_step import live_target, local_devices

        said = local_devices()
        if self._bench is None and find(said[0].kind) is None:
            from nbdist.worker.profiling.device_bench import measure

            self._bench = measure(self.mesh, said)
        return live_target(said, self._bench)

    def take_bench(self, bench: Bench | None) -> None:
        """Plan from here on with what was measured of these devices."""
        self._bench = bench
        self.__dict__.pop("target", None)

    def note_sharded(self, arrays: Iterable[jax.Array]) -> None:
        """A plan has laid these arrays out: a later one may do so anew."""
        self._sharded = {place: held for place, held in self._sharded.items() if held() is not None}
        self._sharded |= {id(array): weakref.ref(array) for array in arrays}

    def has_sharded(self, array: jax.Array) -> bool:
        """Whether a plan has laid it out, and not its user."""
        held = self._sharded.get(id(array))
        return held is not None and held() is array

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of devices that the data axis spans."""
        size: int = self.mesh.size
        return size

    @contextlib.contextmanager
    def scope(self) -> Iterator[PjRTStrategy]:
        """Within it, `jax.jit` and `jax.P` mean this mesh, and Keras on JAX trains over it.

        What was set before is set again afterwards; scopes may be nested.
        """
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(jax.set_mesh(self.mesh))
            open_scope = scopes, self._placement
            _scopes.append(open_scope)
            try:
                if "keras" in sys.modules:
                    _enter_keras(scopes, self._placement)
                else:
                    _enter_once_imported()
                yield self
                jax.effects_barrier()  # what callbacks do is done when the cell is over
            finally:
                _scopes.remove(open_scope)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `fn` once for each replica, all at once.

        A replica gets its own rows of arrays that are cut over the mesh (the batches of this
        strategy's data sets), its own value of what `run` returned, and all of anything else.
        `jax.lax.psum(x, "data")` and the like work in `fn`. It is compiled for as long as it and
        what it reads from outside are the same objects: hand over what changes as an argument.

        Returns:
            What `fn` returns, each leaf one value for each replica.
        """
        return self._runner.run(fn, tuple(args), dict(kwargs or {}))

    def reduce(self, reduce_op: object, value: Any, axis: int | None = None) -> Any:
        """Combine the replicas' values; the result is on every device.

        Args:
            reduce_op: `SUM` or `MEAN`, or TensorFlow's `ReduceOp`.
            value: what `run` returned.
            axis: an axis of each replica's value to reduce as well, usually the samples' (0).
        """
        return self._runner.reduce(reduce_op, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas; `(value,)` where it is no replica's own."""
        return value.local() if isinstance(value, (PerReplica, Ragged)) else (value,)

    def experimental_distribute_dataset(
        self, dataset: object, options: object = None
    ) -> DistributedDataset:
        """Cut the global batches of a data set that is the same on every process.

        Args:
            dataset: a `tf.data.Dataset`, a `keras.utils.PyDataset`, or a list of batches.
            options: taken so that TensorFlow's code reads the same; nothing to choose here.

        Raises:
            StrategyError: it is no data set.
        """
        del options
        return DistributedDataset(GlobalSource(dataset, self._placement), self._placement)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: object = None
    ) -> DistributedDataset:
        """Global batches of the parts that each process reads for itself.

        A step takes one element for each of the process's devices: batch by
        `ctx.get_per_replica_batch_size(global_batch_size)`, as under TensorFlow.

        Args:
            dataset_fn: is given an `InputContext` and returns the process's part. Where that is
                an iterator, it is called again for every pass.
            options: taken so that TensorFlow's code reads the same; nothing to choose here.

        Raises:
            StrategyError: what it returns is no data set.
        """
        del options
        context = InputContext(
            num_input_pipelines=self._placement.cut.ranks,
            input_pipeline_id=self._placement.cut.rank,
            num_replicas_in_sync=self.num_replicas_in_sync,
        )
        source = PartSource(lambda: dataset_fn(context), self._placement)
        return DistributedDataset(source, self._placement)


_scopes: list[tuple[contextlib.ExitStack, Placement]] = []
"""Those that are open, in which Keras may yet be imported."""


@functools.cache
def _enter_once_imported() -> None:
    import_hooks.once_imported("keras", _enter_open_scopes)


def _enter_open_scopes() -> None:
    for scopes, placement in _scopes:
        _enter_keras(scopes, placement)


def _enter_keras(scopes: contextlib.ExitStack, placement: Placement) -> None:
    if sys.modules["keras"].backend.backend() == "jax":
        from nbdist.worker.jax.keras import distribution as keras_distribution

        scopes.enter_context(keras_distribution.scope(placement))
