"""Datasets whose batches span the processes: each global batch is one `jax.Array`.

A batch whose rows cannot be split evenly over the devices is neither padded nor truncated. For
Keras and jitted functions, every device receives the whole batch and computes the same result. For
`PjRTStrategy.run`, the batch is split as evenly as possible (`Uneven`).
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
from nbdist.worker.data.batches import RankRows, Share
from nbdist.worker.data.rank_shards import aligned
from nbdist.worker.data.sources import ArrayLike
from nbdist.worker.jax.runtime import processes

if TYPE_CHECKING:
    from jax.sharding import Mesh

Tree = Any
"""Pytree of arrays; the first axis of each array is the axis of samples."""

_LOOKAHEAD = 4  # host batches that are read before the processes compare their row counts
_UNKNOWN = 0xFFFFFFFF


class InputContext(msgspec.Struct, frozen=True):
    """Input context of a dataset function, like `tf.distribute.InputContext`.

    Attributes:
        num_input_pipelines: Number of input pipelines: one per process.
        input_pipeline_id: Index of this process.
        num_replicas_in_sync: Number of devices of all processes.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return a replica's share of a global batch.

        Raises:
            ValueError: The batch size is not a multiple of the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"the global batch of {global_batch_size} samples cannot be split evenly over "
                f"{self.num_replicas_in_sync} replicas: choose a multiple of "
                f"{self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


class Uneven:
    """Leaf of a batch for `PjRTStrategy.run` whose rows do not divide evenly over the devices.

    Contains one part for each local device; a part may be empty.
    """

    def __init__(self, parts: tuple[np.ndarray, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"Uneven({[part.shape for part in self.parts]})"


class Placement:
    """Placement of batches on a mesh with the single axis `data`.

    Args:
        mesh: Mesh over the devices of all processes, ordered by process, with equally many devices
            per process.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.by_row = jax.NamedSharding(mesh, jax.P("data"))
        self.whole = jax.NamedSharding(mesh, jax.P())
        self.local_devices = len(mesh.local_devices)
        self.rank_rows = RankRows(jax.process_index(), mesh.size // self.local_devices, mesh.size)
        self.gather = jax.jit(lambda tree: tree, out_shardings=self.whole)

    def own_share(self, tree: Tree) -> Share:
        """Return this process's share of a batch that every process has."""
        tree = jax.tree.map(np.asarray, tree)

        def taken(part: slice) -> Tree:
            return jax.tree.map(lambda array: array[part], tree)

        return self.rank_rows.share(rows_of(tree), taken)

    def place(self, batch: Share) -> Tree:
        """Place a share as global arrays; a batch that cannot be split is on every device."""
        sharding = self.whole if batch.whole else self.by_row
        return jax.tree.map(
            lambda a: jax.make_array_from_process_local_data(sharding, a), batch.values
        )

    def spread(self, batch: Share) -> Tree:
        """Place a share with each row on one device: as global arrays, or as `Uneven`."""
        if not batch.whole:
            return self.place(batch)
        return jax.tree.map(lambda a: Uneven(self._parts(a)), batch.values)

    def _parts(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        first = self.rank_rows.rank * self.local_devices
        parts = np.array_split(array, self.rank_rows.replicas)
        return tuple(parts[first : first + self.local_devices])

    def part_of(self, share: Share) -> Tree:
        """Return the rows of a share that belong to this process."""
        if not share.whole:
            return share.values
        split = partial(np.array_split, indices_or_sections=self.rank_rows.ranks)
        return jax.tree.map(lambda a: split(a)[self.rank_rows.rank], share.values)

    def join(self, part: Tree, counts: np.ndarray) -> Share:
        """Join the parts of all processes to a global batch.

        Args:
            part: Rows of this process.
            counts: Number of rows of each process, shape `(processes,)`.
        """
        rows = int(counts.sum())
        if (counts == counts[0]).all() and counts[0] % self.local_devices == 0:
            return Share(part, rows, whole=False)
        most = int(counts.max())
        padded = jax.tree.map(lambda a: _padded(a, most), part)
        return self.own_share(
            jax.tree.map(
                lambda a: np.concatenate([a[i, :n] for i, n in enumerate(counts)]),
                processes.gather(padded),
            )
        )


class Source(Protocol):
    """Source of the batches of this process."""

    steps: int | None
    """Batches in a pass, equal on every process; None if unknown."""

    def batches(self) -> Iterator[Share]:
        """Yield the batches of one pass."""
        ...


class GlobalSource:
    """Source whose dataset yields the same global batches on every process.

    Args:
        dataset: A `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterable.
        placement: Placement on the mesh.
    """

    def __init__(self, dataset: object, placement: Placement) -> None:
        self.steps = _length(dataset)
        self._passes = _passes(dataset, _gone_through)
        self._placement = placement

    def batches(self) -> Iterator[Share]:
        return map(self._placement.own_share, self._passes())


class PartSource:
    """Source whose dataset differs per process; a step uses one element per local device.

    Args:
        make: Function that makes the dataset of this process.
        placement: Placement on the mesh.

    Raises:
        StrategyError: `make` returned no dataset.
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
    """Global batches over all devices; each `iter` starts a pass.

    Args:
        source: Source of the batches.
        placement: Placement on the mesh.

    Attributes:
        steps: Batches in a pass; None if unknown.
    """

    def __init__(self, source: Source, placement: Placement) -> None:
        self._source = source
        self._placement = placement
        self.steps = source.steps

    def __iter__(self) -> Iterator[Tree]:
        """Yield batches with each row on one device; leaves that cannot be split are `Uneven`."""
        return map(self._placement.spread, self._source.batches())

    def own_parts(self) -> Iterator[Tree]:
        """Yield the rows of this process; a batch that cannot be split is divided almost evenly."""
        for share in self._source.batches():
            yield self._placement.part_of(share)

    def arrays(self) -> Iterator[Tree]:
        """Yield global arrays; a batch that cannot be split evenly is whole on every device."""
        return map(self._placement.place, self._source.batches())


def rows_of(tree: Tree) -> int:
    """Return the number of samples in a batch."""
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
    """Return a function that starts a pass; `make` replaces an iterator that is exhausted."""
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
            f"expected a dataset, got {type(dataset).__name__}: pass a tf.data.Dataset, "
            "a keras.utils.PyDataset, or a list or generator of batches such as (x, y)"
        )
    return lambda: (jax.tree.map(np.asarray, element) for element in begin())


class _First:
    """Callable that returns an iterator first, and new ones from `make` on later calls."""

    def __init__(self, iterator: Iterator[Tree], make: Callable[[], Any]) -> None:
        self._waiting = [iterator]
        self._make = make

    def __call__(self) -> Iterator[Tree]:
        return self._waiting.pop() if self._waiting else iter(self._make())


def _indexed(dataset: Any) -> Iterator[Tree]:
    """Yield a pass of a `keras.utils.PyDataset`, loaded on this thread whatever its `workers`."""
    batches = dataset.num_batches
    for i in itertools.count() if batches is None else range(batches):
        yield dataset[i]
    dataset.on_epoch_end()


def _gone_through() -> Any:
    raise StrategyError(
        "the dataset is an iterator and is exhausted after one pass: pass a list, a "
        "tf.data.Dataset, or a function to distribute_datasets_from_function"
    )


def _refuse_empty(counts: np.ndarray) -> None:
    """Raise if only some ranks have no batch: such a rank does not know the shapes."""
    without = np.flatnonzero(counts == 0)
    if 0 < len(without) < len(counts):
        raise StrategyError(
            f"rank {', '.join(map(str, without))} has no batch, but other ranks do: give every "
            "rank's pipeline (ctx.input_pipeline_id) at least one batch"
        )
