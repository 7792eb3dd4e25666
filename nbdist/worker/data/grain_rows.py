"""Data sets and loaders of grain, of which each rank reads its own rows of each global batch.

A `grain.MapDataset`, and the sampler of a `grain.DataLoader`, have random access. Each rank takes
the positions of its rows in the order of one device, and grain reads these only, with the user's
operations and reading threads. Random operations of grain draw from seeds that depend on the
position, so the rows equal those of one device.

Other data sets of grain are read as iterables: each rank reads all elements. grain has no public
names for the operations of a data set: this module reads private attributes of grain 0.2.18. A
version without them reads as iterables.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from nbdist.errors import StepError
from nbdist.private_api import grain as private_grain
from nbdist.worker.data.batches import Batch, map_arrays, refuse_other_rows
from nbdist.worker.data.map_pushdown import BY_ELEMENT
from nbdist.worker.data.padding import Padding, stack
from nbdist.worker.data.stores import BY_ROW

if TYPE_CHECKING:
    from nbdist.records import StepOptions
    from nbdist.worker.data.batches import RankRows, Tree

Stack = Callable[[list[Any]], Any]
"""Function that makes a batch of samples."""


class Samples(Struct, frozen=True):
    """Samples with random access, and their batches.

    Attributes:
        count: number of samples; `sys.maxsize` if they never end.
        read: reads the samples at some positions, in this order.
        batch: number of samples in a global batch.
        stack: makes a batch of samples.
    """

    count: int
    read: Callable[[Sequence[int]], Iterable[Tree]]
    batch: int
    stack: Stack


class GrainRows:
    """Source of global batches of which each rank reads its own rows only.

    Args:
        samples: the samples.
    """

    by_number = common = True
    sharding = BY_ROW

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._steps = -(-samples.count // samples.batch)
        is_endless = samples.count == sys.maxsize
        self.samples = -1 if is_endless else samples.count
        self.steps = -1 if is_endless else self._steps

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        del number
        positions = Positions(self._samples.count, self._samples.batch, rank_rows, first)
        own = iter(self._samples.read(positions))
        for step in range(first, self._steps):
            rows = self._rows(step)
            share = rank_rows.share(len(rows), rows.__getitem__)
            tree = self._stacked(itertools.islice(own, len(share.values)))
            if rank_rows.ranks > 1:
                refuse_other_rows(self._first, tree)
            everything = functools.cache(functools.partial(self._whole, rows))
            yield Batch((tree,), share.rows, share.whole, everything)

    def _rows(self, step: int) -> range:
        """Return the positions of a global batch."""
        samples = self._samples
        return range(step * samples.batch, min((step + 1) * samples.batch, samples.count))

    def _whole(self, rows: range) -> tuple[Tree, ...]:
        return (self._stacked(self._samples.read(rows)),)

    def sample(self, position: int) -> Tree:
        """Return the sample at a position."""
        (found,) = self._samples.read([position])
        return found

    @functools.cached_property
    def _first(self) -> Tree:
        """Batch of the first sample. A rank does not see the samples of the others."""
        return self._whole(range(1))[0]

    def _stacked(self, samples: Iterable[Tree]) -> Tree:
        return map_arrays(np.asarray, self._samples.stack(list(samples)))


class Positions(Sequence[int]):
    """Positions of a rank's samples in an epoch, batch after batch.

    Args:
        samples: number of samples.
        batch: number of samples in a global batch.
        rank_rows: rows of the rank.
        first: number of batches to skip.
    """

    def __init__(self, samples: int, batch: int, rank_rows: RankRows, first: int = 0) -> None:
        full, rest = divmod(samples, batch)
        self._batch = batch
        self._first = first
        self._own = rank_rows.share(batch, range(batch).__getitem__).values
        self._rest = rank_rows.share(rest, range(full * batch, samples).__getitem__).values
        if first > full:
            self._rest = range(0)
        self._of_full = max(0, full - first) * len(self._own)

    def __len__(self) -> int:
        return self._of_full + len(self._rest)

    def __getitem__(self, number: Any) -> Any:
        if number >= self._of_full:
            return self._rest[number - self._of_full]
        batch, row = divmod(number, len(self._own))
        return (self._first + batch) * self._batch + self._own[row]


def is_grain(value: object) -> bool:
    """Return True for data sets and loaders of grain. Their iterators are iterables of Python."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(
        value, (grain.MapDataset, grain.IterDataset, grain.DataLoader)
    )


def find(value: Any, options: StepOptions) -> tuple[GrainRows | None, str]:
    """Return the source of a data set of grain, and a description of the sharding.

    Args:
        value: the data set or loader.
        options: options of the step.

    Returns:
        The source, None if each rank must read all elements, and the description.

    Raises:
        StepError: the data set never ends, and the options have no number of steps.
    """
    is_loader = isinstance(value, sys.modules["grain"].DataLoader)
    if options.bucket:
        return None, BY_ELEMENT
    found: Samples | str = private_grain.OWN_ROWS.fault()
    if not found:
        _refuse_endless(value, options)
        found = (_of_loader if is_loader else _of_dataset)(value, options.batch)
    if isinstance(found, str):
        return None, f"by element: each worker reads all samples, because {found}"
    return GrainRows(found), BY_ROW


def own_part(value: Any, options: StepOptions, rank: int, ranks: int) -> Any:
    """Return the samples `rank`, `rank + ranks`, ... of a data set; None without random access.

    Raises:
        LibraryVersionError: nbdist does not know the installed version.
        StepError: the elements are batches, or never end.
    """
    grain = sys.modules["grain"]
    private_grain.OWN_ROWS.check()
    _refuse_endless(value, options)
    part = slice(rank, None, ranks)
    if isinstance(value, grain.DataLoader):
        sampler = _sampler_of(value)
        if not isinstance(sampler, Sized) or not _is_whole(value):
            return None
        _refuse_batches(any(isinstance(o, grain.transforms.Batch) for o in value._operations))
        processes = value.multiprocessing_options
        return _loader_of(
            value,
            _Chosen(sampler, range(len(sampler))[part]),
            value._operations,
            worker_count=processes.num_workers,
            worker_buffer_size=processes.per_worker_buffer_size,
        )
    _refuse_batches(not isinstance(_batches(value), str))
    below, reading = _below_prefetch(value, grain.ReadOptions())
    if not isinstance(below, grain.MapDataset):
        return None
    _refuse_batches(not isinstance(_batches(below), str))
    return below.slice(part).to_iter_dataset(reading)


def _refuse_batches(are_batches: bool) -> None:
    if are_batches:
        raise StepError("--order source: remove `batch` from the data set; --batch makes batches")


def _refuse_endless(value: Any, options: StepOptions) -> None:
    if isinstance(value, sys.modules["grain"].DataLoader):
        value = _sampler_of(value)
    if isinstance(value, Sized) and len(value) == sys.maxsize and not options.steps:
        raise StepError(f"{options.data} never ends: set the number of steps with --steps N")


def _of_dataset(value: Any, batch: int) -> Samples | str:
    """Return the samples of a data set, or the reason why they have no random access."""
    grain = sys.modules["grain"]
    below, reading = _below_prefetch(value, grain.ReadOptions())
    stacks: Stack = _stack
    drops = False
    if not batch:
        found = _batches(below)
        if isinstance(found, str):
            return found
        batch, drops, stacks = found
        below, reading = _below_prefetch(below.parents[0], reading)
    if not isinstance(below, grain.MapDataset):
        return "an operation on samples follows `to_iter_dataset`"
    try:
        below.batch(1)
    except ValueError:
        return "`filter` or `flat_map` changes the number of samples"

    def read(positions: Sequence[int]) -> Iterable[Tree]:
        chosen = grain.MapDataset.source(_Chosen(below, positions))
        return chosen.to_iter_dataset(reading)  # type: ignore[no-any-return]

    return Samples(_count(len(below), batch, drops=drops), read, batch, stacks)


def _of_loader(loader: Any, batch: int) -> Samples | str:
    """Return the samples of a loader, or the reason why a rank cannot read its own only."""
    grain = sys.modules["grain"]
    sampler = _sampler_of(loader)
    if not isinstance(sampler, Sized):
        return "the loader's sampler has no length"
    if loader.multiprocessing_options.num_workers:
        return "the loader has worker processes"
    if not _is_whole(loader):
        return "the loader has `shard_options`"
    operations, drops = list(loader._operations), False
    stacks: Stack = _stack
    if not batch:
        match operations[-1:]:
            case [grain.transforms.Batch(batch_fn=None) as last]:
                batch, drops = last.batch_size, last.drop_remainder
                stacks = private_grain.make_batch
                operations.pop()
            case _:
                return "its last operation is not a `Batch` without `batch_fn`"
    one_to_one = (grain.transforms.Map, grain.transforms.RandomMap)
    if not all(isinstance(operation, one_to_one) for operation in operations):
        return "an operation before the batch is neither `Map` nor `RandomMap`"

    def read(positions: Sequence[int]) -> Iterable[Tree]:
        return _loader_of(loader, _Chosen(sampler, positions), operations)  # type: ignore[no-any-return]

    return Samples(_count(len(sampler), batch, drops=drops), read, batch, stacks)


def _loader_of(loader: Any, sampler: Any, operations: list[Any], **workers: int) -> Any:
    """Return the loader with another sampler, other operations and other worker processes."""
    return sys.modules["grain"].DataLoader(
        data_source=loader._data_source,
        sampler=sampler,
        operations=operations,
        shard_options=loader._shard_options,
        read_options=loader._read_options,
        **workers,
    )


def _is_whole(loader: Any) -> bool:
    """Return True if the loader reads all records, not those of one shard."""
    return isinstance(loader._shard_options, sys.modules["grain"].sharding.NoSharding)


class _Chosen:
    """Items of a data set or sampler at some positions."""

    def __init__(self, items: Any, positions: Sequence[int]) -> None:
        self._items = items
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, number: int) -> Any:
        position = self._positions[number]
        item = self._items[position]
        if item is None:  # grain leaves it out: later samples would move
            raise StepError(
                f"sample {position} is None: use `filter` of grain in place of a map that returns "
                "None"
            )
        return item


def _sampler_of(loader: Any) -> Any:
    return loader._sampler


def _below_prefetch(dataset: Any, reading: Any) -> tuple[Any, Any]:
    """Return the data set below `to_iter_dataset`, if any, and its options for reading."""
    if isinstance(dataset, private_grain.PrefetchIterDataset):
        return dataset.parents[0], dataset._read_options
    return dataset, reading


def _batches(dataset: Any) -> tuple[int, bool, Stack] | str:
    """Return size, dropping of the rest, and function of the last operation, or a reason."""
    kinds = private_grain.BatchMapDataset, private_grain.BatchIterDataset
    if not isinstance(dataset, kinds):
        return "its last operation is not `batch`"
    if dataset._batch_fn is not private_grain.make_batch:
        return "its `batch` has a `batch_fn`"
    return dataset._batch_size, dataset._drop_remainder, dataset._batch_fn


def _stack(samples: list[Tree]) -> Tree:
    return Padding(()).of(stack(samples))[0]


def _count(samples: int, batch: int, *, drops: bool) -> int:
    """Return the number of samples in an epoch, without a rest that is dropped."""
    return samples - samples % batch if drops and samples < sys.maxsize else samples
