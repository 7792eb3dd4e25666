"""Sources that each rank reads in part, for `--order source`, and row groups of Parquet files.

They are data sets of Hugging Face, grain and webdataset, and Parquet files.

For `--order source`, each rank reads shards of its own. A global batch contains samples of the
shards of all ranks, so the order differs from that of one device, and depends on the number of
ranks. Every sample counts once. Without the option, samples are in the order of one device. A rank
then skips row groups without rows of its own, and reads all samples of the other data sets.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import StepError
from nbdist.private_api.pyarrow import FILTERS
from nbdist.worker.data import grain_rows
from nbdist.worker.data.batches import leaves, map_trees, rows_of
from nbdist.worker.data.indexed_rows import IndexedRows
from nbdist.worker.data.map_pushdown import BY_ELEMENT
from nbdist.worker.data.padding import Ragged, column_of
from nbdist.worker.data.rank_shards import Parts
from nbdist.worker.data.stores import is_of, read_all, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nbdist.records import StepOptions
    from nbdist.worker.data.batches import Tree

ALL_GROUPS = (
    "by element: each worker reads all row groups, because each group has rows of every worker"
)
BY_SOURCE = "by source: each worker reads shards of its own, in another order than one device"


class Parquet:
    """Row groups of Parquet files: a `pyarrow.dataset.Dataset` or a `pyarrow.parquet.ParquetFile`.

    Args:
        value: the files, local or in an object store.
        name: name of the data set in messages.

    Raises:
        StepError: the data set has a filter. Methods also raise it if the files cannot be read.
    """

    def __init__(self, value: Any, name: str) -> None:
        if is_of(value, "pyarrow.dataset", "FileSystemDataset"):
            _refuse_filter(value, name)
        self._value = value
        self._name = name

    def rows(self, options: StepOptions, ranks: int) -> IndexedRows:
        """Return the samples in the order of the files."""
        groups = RowGroups(self._read(self._groups))
        sharding = groups.sharding(options.batch, ranks)
        alike = not options.bucket
        return IndexedRows(len(groups), groups.read, self._name, alike=alike, sharding=sharding)

    def batches(self, rows: int, rank: int = 0, ranks: int = 1) -> Iterator[dict[str, np.ndarray]]:
        """Yield columns of `rows` rows each, the last ones of fewer.

        Args:
            rows: number of rows.
            rank: this rank. It reads row groups `rank`, `rank + ranks`, ...
            ranks: number of ranks that share the row groups.
        """
        pool: dict[str, np.ndarray] | None = None
        for _, read in self._read(self._groups)[rank::ranks]:
            table = self._read(read)
            columns = {name: _array_of(part, name) for name, part in _columns(table).items()}
            pool = columns if pool is None else _joined(pool, columns)
            while _rows(pool) >= rows:
                yield rows_of(pool, slice(rows))
                pool = rows_of(pool, slice(rows, None))
        if pool is not None and _rows(pool):
            yield pool

    def _groups(self) -> list[tuple[int, Callable[[], Any]]]:
        """Return the number of rows of each row group, and a function that reads it."""
        value: Any = self._value
        if is_of(value, "pyarrow.parquet", "ParquetFile"):
            rows = [value.metadata.row_group(n).num_rows for n in range(value.num_row_groups)]
            return [(count, partial(value.read_row_group, n)) for n, count in enumerate(rows)]
        pieces = [p for f in value.get_fragments() for p in f.split_by_row_group()]
        rows = [piece.row_groups[0].num_rows for piece in pieces]  # count_rows counts the file
        reads = [partial(piece.to_table, schema=value.schema) for piece in pieces]
        return list(zip(rows, reads, strict=True))

    def _read(self, function: Callable[[], Any]) -> Any:
        with reading(self._name):
            return function()


class RowGroups:
    """Row groups in the order of their rows.

    A rank keeps the groups of the rows that it has read last, for the next ones.

    Args:
        groups: number of rows of each group, and a function that reads it as a table of PyArrow.
    """

    def __init__(self, groups: Sequence[tuple[int, Callable[[], Any]]]) -> None:
        filled = [(rows, read) for rows, read in groups if rows]
        self._starts = np.cumsum([0, *(rows for rows, _ in filled)])
        self._reads = [read for _, read in filled]
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of consecutive rows."""
        first, last = int(rows[0]), int(rows[-1])
        numbers = range(self._group_of(first), self._group_of(last) + 1)
        kept = self._kept
        self._kept = {n: kept[n] if n in kept else self._reads[n]() for n in numbers}
        parts = []
        for number, table in self._kept.items():
            start = int(self._starts[number])
            begin = max(first - start, 0)
            parts.append(table.slice(begin, last + 1 - start - begin))
        return _columns(sys.modules["pyarrow"].concat_tables(parts))

    def sharding(self, batch: int, ranks: int) -> str:
        """Describe the row groups that ranks read for global batches of `batch` rows."""
        counts = [self._count(batch, rank, ranks) for rank in range(ranks)]
        if ranks == 1 or not counts[0]:
            return BY_ELEMENT
        total = len(self._reads)
        if min(counts) == total:
            return ALL_GROUPS
        each = f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else counts[0]
        own = "those of its own rows"
        return f"by row group: each worker reads {each} of {total} row groups, {own}"

    def _count(self, batch: int, rank: int, ranks: int) -> int:
        """Return the number of groups with rows of a rank."""
        begins = np.arange(0, len(self), batch)
        sizes = np.minimum(batch, len(self) - begins)
        whole = sizes % ranks > 0
        each = np.where(whole, sizes, sizes // ranks)
        firsts = begins + np.where(whole, 0, rank * each)
        changes = np.zeros(len(self._starts), int)
        np.add.at(changes, self._group_of(firsts), 1)
        np.add.at(changes, self._group_of(firsts + each - 1) + 1, -1)
        return int(np.count_nonzero(np.cumsum(changes)))

    def _group_of(self, rows: Any) -> Any:
        return np.searchsorted(self._starts, rows, side="right") - 1


def split_source(
    value: Any,
    options: StepOptions,
    rank: int,
    ranks: int,
    gather: Callable[[np.ndarray], np.ndarray],
) -> Parts:
    """Return the source of this rank's shards of a data set, for `--order source`.

    Args:
        value: a Hugging Face data set, map-style or streaming, Parquet files of PyArrow, a data set
            or loader of grain, or a pipeline of webdataset.
        options: options of the step.
        rank: this rank.
        ranks: number of ranks.
        gather: gathers int32 numbers, see `Parts`.

    Raises:
        StepError: the value has no shards, or options do not fit.
    """
    name = options.data
    if not options.batch or options.bucket or options.shuffle is not None:
        raise StepError("--order source needs --batch N, and no --bucket or --shuffle")
    each = max(1, options.batch // ranks)
    if is_parquet(value):
        files = Parquet(value, name)
        return Parts(lambda: files.batches(each, rank, ranks), options.batch, BY_SOURCE, gather)
    part: Any = None
    if grain_rows.is_grain(value):
        part = grain_rows.own_part(value, options, rank, ranks)
    elif is_of(value, "webdataset", "DataPipeline"):
        part = _own_tar_files(value, name, rank, ranks)
    if part is not None:
        return Parts(lambda: _stacked(part, each, name), options.batch, BY_SOURCE, gather)
    if not any(is_of(value, "datasets", kind) for kind in ("Dataset", "IterableDataset")):
        raise StepError(
            f"--order source: {name} has type {type(value).__name__}, which nbdist cannot divide "
            "at its source: use a data set of Hugging Face, grain or webdataset, Parquet files or "
            "a tf.data.Dataset, or omit --order source"
        )
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    own = split(value, rank, ranks).with_format("numpy")
    return Parts(lambda: _groups_of(own, each, name), options.batch, BY_SOURCE, gather)


def _own_tar_files(pipeline: Any, name: str, rank: int, ranks: int) -> Any:
    """Return a pipeline of webdataset that reads every `ranks`-th tar file; None for other sources.

    It takes the files before the other stages, as `webdataset.split_by_node` does.

    Raises:
        StepError: there are fewer files than ranks, or the pipeline counts samples of all ranks.
    """
    files, *stages = pipeline.pipeline
    if not is_of(files, "webdataset", "SimpleShardList"):
        return None
    count = len(pipeline.pipeline[0].urls)
    if count < ranks:
        raise StepError(
            f"--order source: {name} has {count} tar files, fewer than {ranks} workers: write "
            "more of them, or omit --order source"
        )
    if pipeline.nsamples > 0:
        raise StepError(
            f"--order source: {name} has `with_epoch`, which counts the samples of one worker: use "
            "--steps N instead"
        )
    own = copy.copy(pipeline)
    own.pipeline = [files, lambda urls: itertools.islice(urls, rank, None, ranks), *stages]
    return own


def _stacked(samples: Iterable[Tree], rows: int, name: str) -> Iterator[Tree]:
    """Yield samples, stacked to parts of `rows` rows."""
    with reading(name):
        remaining = iter(samples)
        while group := list(itertools.islice(remaining, rows)):
            try:
                yield map_trees(np.stack, group)
            except ValueError as error:
                raise StepError(
                    f"the samples of {name} have different shapes: map them to arrays of one shape"
                ) from error


def is_parquet(value: object) -> bool:
    """Return True for files of PyArrow that have row groups."""
    return is_of(value, "pyarrow.parquet", "ParquetFile") or is_of(
        value, "pyarrow.dataset", "FileSystemDataset"
    )


def _refuse_filter(dataset: Any, name: str) -> None:
    """Raise StepError for a filter, which row groups do not apply."""
    FILTERS.check()
    if dataset._scan_options:
        raise StepError(f"{name} has a filter: use arrays, such as those of {name}.to_table()")


def _groups_of(samples: Any, rows: int, name: str) -> Iterator[Tree]:
    """Yield samples, stacked to parts of `rows` rows."""
    for part in read_all(samples.iter(batch_size=rows), name):
        yield {key: _array_of(column, key) for key, column in part.items()}


def _array_of(column: Any, name: str) -> np.ndarray:
    array = column_of(column)
    if isinstance(array, Ragged) or array.dtype == object:
        raise StepError(
            f"the samples of column `{name}` have different shapes: map them to arrays of one "
            "shape, or remove the column"
        )
    return array


def _columns(table: Any) -> dict[str, Any]:
    """Return the columns of a table of PyArrow: shape `(rows,)`, or `(rows, ...)` for lists."""
    return {name: _column(table[name], name) for name in table.column_names}


def _column(column: Any, name: str) -> np.ndarray | Ragged:
    if column.null_count:
        raise StepError(f"column `{name}` has missing values: fill them, or remove the column")
    array = column.to_numpy()
    if array.dtype == object and len({np.shape(row) for row in array}) == 1:
        array = np.stack(array)
    return column_of(array)


def _rows(tree: Tree) -> int:
    return len(leaves(tree)[0])


def _joined(one: Tree, other: Tree) -> Any:
    return map_trees(np.concatenate, [one, other])
