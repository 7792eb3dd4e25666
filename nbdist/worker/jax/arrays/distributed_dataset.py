"""Data sets whose batches span the processes: a global batch is one `jax.Array` over all devices.

A batch that cannot be cut evenly over the devices is not padded and loses nothing. For Keras and
for jitted functions it is given whole to every device, each of which then computes the same. For
`PjRTStrategy.run` it is cut as evenly as it can be (`Uneven`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import msgspec
import numpy as np

from nbdist.errors import StrategyError
from nbdist.worker.data.batches import Cut, Share
from nbdist.worker.data.rank_shards import aligned
from nbdist.worker.data.sources import ArrayLike
from nbdist.worker.jax.runtime import processes

if TYPE_CHECKING:
    from jax.sharding import Mesh

Tree = Any
"""Arrays in any pytree; the first axis of each is the samples'."""

_LOOKAHEAD = 4  # host batches read before the processes compare how many rows each has
_UNKNOWN = 0xFFFFFFFF


class InputContext(msgspec.Struct, frozen=True):
    """What a data set function is told, as by `tf.distribute.InputContext`.

    Attributes:
        num_input_pipelines: one for each process.
        input_pipeline_id: this process's.
        num_replicas_in_sync: devices of all processes.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """A replica's share of a global batch.

        Raises:
            ValueError: the replicas do not divide it.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"the global batch of {global_batch_size} samples cannot be cut evenly for "
                f"{self.num_replicas_in_sync} replicas: choose a multiple of "
                f"{self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


class Uneven:
    """Rows that the devices do not divide: one part, maybe empty, for each local device.

    A leaf of a batch, for `PjRTStrategy.run`.
    """

    def __init__(self, parts: tuple[np.ndarray, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"Uneven({[part.shape for part in self.parts]})"


class Placement:
    """Puts batches on a mesh of one axis, `data`.

    Args:
        mesh: over devices of all processes, process by process, each having as many.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.by_row = jax.NamedSharding(mesh, jax.P("data"))
        self.whole = jax.NamedSharding(mesh, jax.P())
        self.local_devices = len(mesh.local_devices)
        self.cut = Cut(jax.process_index(), mesh.size // self.local_devices, mesh.size)
        self.gather = jax.jit(lambda tree: tree, out_shardings=self.whole)

    def cut_global(self, tree: Tree) -> Share:
        """This process's share of a batch that every process has."""
        tree = jax.tree.map(np.asarray, tree)
        return self.cut.share(rows_of(tree), lambda part: jax.tree.map(lambda a: a[part], tree))

    def place(self, batch: Share) -> Tree:
        """As global arrays; a batch that cannot be cut is on every device."""
        sharding = self.whole if batch.whole else self.by_row
        return jax.tree.map(
            lambda a: jax.make_array_from_process_local_data(sharding, a), batch.values
        )

    def spread(self, batch: Share) -> Tree:
        """As global arrays, or as `Uneven`: every row is on one device only."""
        if not batch.whole:
            return self.place(batch)
        return jax.tree.map(lambda a: Uneven(self._parts(a)), batch.values)

    def _parts(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        first = self.cut.rank * self.local_devices
        return tuple(np.array_split(array, self.cut.replicas)[first : first + self.local_devices])

    def part_of(self, share: Share) -> Tree:
        """This process's own rows of a share."""
        if not share.whole:
            return share.values
        split = partial(np.array_split, indices_or_sections=self.cut.ranks)
        return jax.tree.map(lambda a: split(a)[self.cut.rank], share.values)

    def join(self, part: Tree, counts: np.ndarray) -> Share:
        """A global batch of the processes' own parts.

        Args:
            part: this process's rows.
            counts: rows of each process.
        """
        rows = int(counts.sum())
        if (counts == counts[0]).all() and counts[0] % self.local_devices == 0:
            return Share(part, rows, whole=False)
        most = int(counts.max())
        padded = jax.tree.map(lambda a: _padded(a, most), part)
        return self.cut_global(
            jax.tree.map(
                lambda a: np.concatenate([a[i, :n] for i, n in enumerate(counts)]),
                processes.gather(padded),
            )
        )


class Source(Protocol):
    """Batches as this process has them."""

    steps: int | None
    """Batches of a pass, on every process the same; None when that is not known."""

    def batches(self) -> Iterator[Share]:
        """One pass."""
        ...


class GlobalSource:
    """Global batches, of which every process has all rows.

    Args:
        dataset: a `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterable.
        placement: for the mesh.
    """

    def __init__(self, dataset: object, placement: Placement) -> None:
        self.steps = _length(dataset)
        self._passes = _passes(dataset, _gone_through)
        self._placement = placement

    def batches(self) -> Iterator[Share]:
        return map(self._placement.cut_global, self._passes())


class PartSource:
    """Each process's own part; a step takes one element for each of its devices.

    Args:
        make: makes the process's data set.
        placement: for the mesh.

    Raises:
        StrategyError: what `make` returns is no data set.
    """

    def __init__(self, make: Callable[[], object], placement: Placement) -> None:
        dataset = make()
        length = _length(dataset)
        self._passes = _passes(dataset, make)
        self._placement = placement
        each = placement.local_devices
        own = _UNKNOWN if length is None else -(-length // each)
        longest = int(processes.agree([own]).max())
        self.steps = None if longest == _UNKNOWN else longest

    def batches(self) -> Iterator[Share]:
        empty: Tree = None
        for part, rows in aligned(self._parts(), _LOOKAHEAD, processes.gather, rows_of):
            if empty is None:
                _refuse_empty(rows)
                empty = jax.tree.map(lambda a: a[:0], part)
            yield self._placement.join(empty if part is None else part, rows)

    def _parts(self) -> Iterator[Tree]:
        elements = self._passes()
        while group := tuple(itertools.islice(elements, self._placement.local_devices)):
            yield jax.tree.map(lambda *arrays: np.concatenate(arrays), *group)


class DistributedDataset:
    """Global batches over all devices, one pass for each `iter`.

    Args:
        source: where they come from.
        placement: where they go.

    Attributes:
        steps: batches of a pass; None when that is not known beforehand.
    """

    def __init__(self, source: Source, placement: Placement) -> None:
        self._source = source
        self._placement = placement
        self.steps = source.steps

    def __iter__(self) -> Iterator[Tree]:
        """Every row on one device; a batch that cannot be cut evenly has `Uneven` leaves."""
        return map(self._placement.spread, self._source.batches())

    def own_parts(self) -> Iterator[Tree]:
        """A pass in this process's rows; of a batch that cannot be cut, an even split of them."""
        for share in self._source.batches():
            yield self._placement.part_of(share)

    def arrays(self) -> Iterator[Tree]:
        """A pass in global arrays; a batch that cannot be cut evenly is whole on every device."""
        return map(self._placement.place, self._source.batches())


def rows_of(tree: Tree) -> int:
    """The number of samples in a batch."""
    return len(jax.tree.leaves(tree)[0])


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))


def _tensorflow_dataset(dataset: object) -> bool:
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset)


def _py_dataset(dataset: object) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(dataset, keras.utils.PyDataset)


def _length(dataset: Any) -> int | None:
    if _tensorflow_dataset(dataset):
        cardinality = int(dataset.cardinality())
        return cardinality if cardinality >= 0 else None
    if _py_dataset(dataset):
        batches: int | None = dataset.num_batches
        return batches
    return len(dataset) if isinstance(dataset, Sized) else None


def _passes(dataset: Any, make: Callable[[], Any]) -> Callable[[], Iterator[Tree]]:
    """A function that begins a pass; what can be gone through once only is made anew for each."""
    begin: Callable[[], Iterator[Tree]]
    if _tensorflow_dataset(dataset):
        begin = dataset.as_numpy_iterator
    elif _py_dataset(dataset):
        begin = partial(_indexed, dataset)
    elif isinstance(dataset, Iterator):
        begin = _First(dataset, make)
    elif isinstance(dataset, Iterable) and not isinstance(dataset, (tuple, dict, ArrayLike)):
        begin = partial(iter, dataset)
    else:
        raise StrategyError(
            f"a data set was wanted, and a {type(dataset).__name__} came: give a tf.data.Dataset, "
            "a keras.utils.PyDataset, or a list or generator of batches such as (x, y)"
        )
    return lambda: (jax.tree.map(np.asarray, element) for element in begin())


class _First:
    """An iterator the first time, and then what `make` makes."""

    def __init__(self, iterator: Iterator[Tree], make: Callable[[], Any]) -> None:
        self._waiting = [iterator]
        self._make = make

    def __call__(self) -> Iterator[Tree]:
        return self._waiting.pop() if self._waiting else iter(self._make())


def _indexed(dataset: Any) -> Iterator[Tree]:
    """A pass of a `keras.utils.PyDataset`, loaded on this thread whatever its `workers`."""
    batches = dataset.num_batches
    for i in itertools.count() if batches is None else range(batches):
        yield dataset[i]
    dataset.on_epoch_end()


def _gone_through() -> Any:
    raise StrategyError(
        "the data set is an iterator, which can be gone through once: give a list, a "
        "tf.data.Dataset, or a function to distribute_datasets_from_function"
    )


def _refuse_empty(counts: np.ndarray) -> None:
    """Without a batch of its own, a process knows no shapes."""
    without = np.flatnonzero(counts == 0)
    if 0 < len(without) < len(counts):
        raise StrategyError(
            f"rank {', '.join(map(str, without))} has no batch, and others have: give every "
            "rank's pipeline (ctx.input_pipeline_id) at least one"
        )
