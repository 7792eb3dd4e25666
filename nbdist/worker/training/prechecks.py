"""Checks before the first step: equal data and state on all ranks, and the size of the batch.

Training would continue in silence with differences: samples seen twice or never, weights of each
rank's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.errors import StepError
from nbdist.worker.checkpoint.digest import of_arrays
from nbdist.worker.data.batches import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StepBegun
    from nbdist.worker.data.batches import Batch

SMALL_BATCH = 4
"""A replica's part of a batch that is too small to be worth a replica."""


def check_data(
    name: str, batch: Batch, samples: int, gather: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Raises StepError when ranks have other numbers of samples, or another first batch.

    Args:
        name: of the data set.
        batch: the first; every rank is to have all of it.
        samples: in an epoch, or -1.
        gather: of int32 numbers, every rank's.
    """
    own = [samples, batch.rows, of_arrays(leaves(batch.everything()))]
    samples_of, rows_of, sums = gather(np.array(own, np.int32)).T
    for what, numbers in (("samples", samples_of), ("rows in the first batch", rows_of)):
        if len(set(numbers.tolist())) > 1:
            raise StepError(
                f"`{name}` has other {what} on each rank: {', '.join(map(str, numbers))}; a step "
                "cell cuts data that all ranks have. For parts of each rank's own, name a "
                "distributed data set (strategy.distribute_datasets_from_function)"
            )
    if len(set(sums.tolist())) > 1:
        raise StepError(
            f"`{name}` begins with other samples on each rank: give its shuffle or its generator "
            "a seed, the same on all"
        )


def check_state(
    sums: dict[str, int], lines: dict[str, int], gather: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Raises StepError for names whose values differ between ranks.

    Args:
        sums: the checksum of each name's value.
        lines: where each name stands first.
        gather: of int32 numbers, every rank's.
    """
    if not sums:
        return
    gathered = gather(np.array(list(sums.values()), np.int32))
    differing = [name for name, own in zip(sums, gathered.T, strict=True) if len(set(own)) > 1]
    if differing:
        named = ", ".join(f"`{name}` (line {lines[name]})" for name in differing)
        raise StepError(
            f"not the same on all ranks: {named}; make it with the same seed on each, or send one "
            "rank's to all"
        )


def remarks(begun: StepBegun) -> list[str]:
    """Return the remarks about the batch of a step, each with the remedy."""
    replicas, rows = begun.replicas, begun.batch
    if replicas == 1:
        return []
    found = []
    if 0 <= begun.samples < replicas:
        found.append(
            f"the data have {begun.samples} samples for {replicas} replicas, which all compute the "
            f"same: type %dist_start {max(1, begun.samples)}, or bring more data"
        )
    elif rows % replicas:
        below, above = rows - rows % replicas, rows + replicas - rows % replicas
        fitting = f"{below} or --batch {above}" if below else f"{above}"
        found.append(
            f"a batch of {rows} does not divide over {replicas} replicas, and each computes all of "
            f"it: type --batch {fitting}"
        )
    elif rows // replicas <= SMALL_BATCH:
        found.append(
            f"each replica has {rows // replicas} samples of a batch of {rows}, too few to be "
            f"worth it: type --batch {8 * replicas} or more"
        )
    return found
