"""Private names of grain."""

from __future__ import annotations

from typing import Any

from nbdist.private_api.features import Library

LIBRARY = Library(
    "grain",
    "grain",
    {
        "BatchIterDataset": "grain._src.python.dataset.transformations.batch:BatchIterDataset",
        "BatchMapDataset": "grain._src.python.dataset.transformations.batch:BatchMapDataset",
        "DataLoader": "grain:DataLoader",
        "PrefetchIterDataset": (
            "grain._src.python.dataset.transformations.prefetch:PrefetchIterDataset"
        ),
        "make_batch": "grain._src.python.dataset.transformations.batch:make_batch",
    },
)

OWN_ROWS = LIBRARY.feature(
    "data sets of grain of which a worker reads its own samples only",
    *("BatchIterDataset._batch_fn", "BatchIterDataset._batch_size"),
    *("BatchIterDataset._drop_remainder", "BatchMapDataset._batch_fn"),
    *("BatchMapDataset._batch_size", "BatchMapDataset._drop_remainder"),
    *("DataLoader._data_source", "DataLoader._operations", "DataLoader._read_options"),
    *("DataLoader._sampler", "DataLoader._shard_options", "PrefetchIterDataset._read_options"),
    "make_batch",
)


def __getattr__(name: str) -> Any:
    return LIBRARY.find(name)
