"""Loaders of PyTorch over map-style data sets, of which each rank reads its own rows only.

Each rank draws the numbers of all samples from the loader's sampler, in the order of one device. A
loader like the user's, with its worker processes, reads the samples of the rank's rows. Written for
PyTorch 2.13. Other loaders are read as iterables: each rank reads all batches.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from nbdist.worker.data.batch_array import MOST_PARTS
from nbdist.worker.data.batches import Batch, map_arrays, refuse_other_rows
from nbdist.worker.data.collation import stacks
from nbdist.worker.data.indexed_rows import IS_RANDOM, is_random
from nbdist.worker.data.map_pushdown import BY_ELEMENT
from nbdist.worker.data.padding import Padding, column_of
from nbdist.worker.data.stores import BY_ROW, is_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.worker.data.batches import RankRows, Tree

_SETTINGS = (
    *("collate_fn", "num_workers", "timeout", "multiprocessing_context", "generator"),
    "prefetch_factor",
)


def is_loader(value: object) -> bool:
    """Return True for a loader of PyTorch."""
    return is_of(value, "torch", "utils", "data", "DataLoader")


def find(loader: Any, *, is_known: bool = False) -> tuple[LoaderRows | None, str]:
    """Return the source of a loader, and a description of the sharding.

    Args:
        loader: the loader.
        is_known: True if an earlier call has found that samples draw no random numbers.

    Returns:
        The source, None if each rank must read all batches, and the description.
    """
    data = sys.modules["torch"].utils.data
    is_usual = (
        type(loader).__iter__ is data.DataLoader.__iter__
        and type(loader.batch_sampler) is data.BatchSampler
        and not isinstance(loader.dataset, data.IterableDataset)
        and (loader.collate_fn is data.default_collate or stacks(loader.collate_fn))
        and loader.worker_init_fn is None
        and vars(loader).get("in_order", True)  # PyTorch 2.6 has added it
    )
    if not is_usual or not len(loader.dataset):
        return None, BY_ELEMENT
    if not is_known and is_random(loader.dataset):
        return None, IS_RANDOM
    return LoaderRows(loader), BY_ROW


class LoaderRows:
    """Source of global batches of which each rank reads its own rows only.

    Args:
        loader: the loader.
    """

    common = True
    by_number = False
    samples = -1
    sharding = BY_ROW

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.steps = len(loader)

    def epoch(self, number: int, rank_rows: RankRows, first: int = 0) -> Iterator[Batch]:
        del number, first
        for batch in self.batches(rank_rows):
            everything = functools.cache(functools.partial(_all_arguments, batch))
            yield structs.replace(batch, values=_arguments(batch.values), everything=everything)

    def batches(self, rank_rows: RankRows) -> Iterator[Batch]:
        """Yield the batches of an epoch. Their values are batches as the loader returns them."""
        torch, loader = sys.modules["torch"], self._loader
        numbers = _OwnNumbers(loader.batch_sampler, rank_rows)
        settings = {name: getattr(loader, name) for name in _SETTINGS}
        for own in torch.utils.data.DataLoader(loader.dataset, batch_sampler=numbers, **settings):
            all_numbers = numbers.passed.popleft()
            share = rank_rows.share(len(all_numbers), all_numbers.__getitem__)
            if not share.whole and rank_rows.ranks > 1:
                refuse_other_rows(_arguments(self.first)[0], _arguments(own)[0])
            everything = functools.cache(functools.partial(self._read, all_numbers))
            yield Batch(own, share.rows, share.whole, everything)

    @functools.cached_property
    def first(self) -> Any:
        """Batch of the first sample. A rank does not see the samples of the others."""
        return self._read([0])

    def is_plain(self) -> bool:
        """Return True if batches are tensors and arrays in dicts, lists and tuples."""
        return _is_plain(self.first)

    def _read(self, numbers: Sequence[int]) -> Any:
        """Read samples as a loader does: at once, if the data set has a method for it."""
        data = self._loader.dataset
        together = getattr(data, "__getitems__", None)
        samples = together(numbers) if together else [data[number] for number in numbers]
        return self._loader.collate_fn(samples)


class _OwnNumbers:
    """Sampler of the numbers of a rank's samples in each batch.

    Args:
        sampler: sampler of the numbers in global batches.
        rank_rows: rows of the rank.

    Attributes:
        passed: numbers of the global batches whose samples the loader has not returned yet.
    """

    def __init__(self, sampler: Any, rank_rows: RankRows) -> None:
        self._sampler = sampler
        self._rank_rows = rank_rows
        self.passed: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        """Start the sampler immediately, as a loader does: it may draw random numbers."""
        return map(self._own, iter(self._sampler))

    def _own(self, numbers: list[int]) -> list[int]:
        self.passed.append(numbers)
        own: list[int] = self._rank_rows.share(len(numbers), numbers.__getitem__).values
        return own


def _arguments(batch: Any) -> tuple[Tree, ...]:
    """Return a batch of the loader as arguments of a step."""
    return Padding(()).of(map_arrays(column_of, batch))


def _all_arguments(batch: Batch) -> tuple[Tree, ...]:
    return _arguments(batch.everything())


def _is_plain(batch: Any) -> bool:
    if type(batch) in (dict, list, tuple):
        parts = batch.values() if isinstance(batch, dict) else batch
        return len(batch) <= MOST_PARTS and all(map(_is_plain, parts))
    torch = sys.modules["torch"]
    if type(batch) is torch.Tensor:
        return bool(batch.ndim and batch.layout == torch.strided and batch.device.type == "cpu")
    return type(batch) is np.ndarray and bool(batch.ndim) and batch.dtype.kind in "biufcV"
