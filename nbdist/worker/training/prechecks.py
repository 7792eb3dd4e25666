"""Checks before the first step: equal data and state on all ranks, and the size of the batch.

Without the checks, differences would go unnoticed: samples used twice or never, different weights
on each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.errors import StepError
from nbdist.worker.checkpoint.digest import of_arrays
from nbdist.worker.data.batches import Checksums, leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StepBegun
    from nbdist.worker.data.batches import Batch

SMALL_BATCH = 4
"""Largest part of a batch on one replica that counts as too small."""


def check_data(
    name: str, batch: Batch, samples: int, gather: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Raise StepError if ranks have different numbers of samples or different first batches.

    Args:
        name: name of the data set.
        batch: first batch; every rank must have all of it, or its checksums.
        samples: number of samples in an epoch; -1 if unknown.
        gather: gathers int32 numbers from all ranks, to shape `(ranks, n)`.
    """
    sums = batch.checksums
    if sums is None:
        sums = Checksums(whole := of_arrays(leaves(batch.everything())), whole)
    gathered = gather(np.array([samples, batch.rows, *sums], np.int32))
    samples_of, rows_of = gathered[:, :2].T
    for what, numbers in (("samples", samples_of), ("rows in the first batch", rows_of)):
        if len(set(numbers.tolist())) > 1:
            raise StepError(
                f"`{name}` has a different number of {what} on each rank: "
                f"{', '.join(map(str, numbers))}; a step cell splits data that are equal on all "
                "ranks. For separate data on each rank, use a distributed data set "
                "(strategy.distribute_datasets_from_function)"
            )
    if not Checksums.are_equal(gathered[:, 2:]):
        raise StepError(
            f"`{name}` begins with different samples on each rank: use the same seed on all "
            "ranks for its shuffle or its generator"
        )


def check_state(
    sums: dict[str, int], lines: dict[str, int], gather: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Raise StepError for names whose values differ between ranks.

    Args:
        sums: checksum of each name's value.
        lines: line of the first use of each name.
        gather: gathers int32 numbers from all ranks, to shape `(ranks, n)`.
    """
    if not sums:
        return
    gathered = gather(np.array(list(sums.values()), np.int32))
    differing = [name for name, own in zip(sums, gathered.T, strict=True) if len(set(own)) > 1]
    if differing:
        named = ", ".join(f"`{name}` (line {lines[name]})" for name in differing)
        raise StepError(
            f"not the same on all ranks: {named}; create it with the same seed on each rank, or "
            "send one rank's value to all ranks"
        )


def remarks(begun: StepBegun, *, is_split: bool) -> list[str]:
    """Return the warnings about the batch of a step, each with the remedy.

    Args:
        begun: the sizes of the run.
        is_split: True if the replicas share the first batch.
    """
    replicas, rows = begun.replicas, begun.batch
    if replicas == 1:
        return []
    found = []
    use = "use --batch" if begun.epochs else "use a batch of"  # a loop makes its own batches
    if 0 <= begun.samples < replicas:
        found.append(
            f"the data have {begun.samples} samples for {replicas} replicas, so all replicas "
            f"compute the same: run %dist_start {max(1, begun.samples)}, or use more data"
        )
    elif rows % replicas and begun.epochs:  # a loop says so in its first line
        below, above = rows - rows % replicas, rows + replicas - rows % replicas
        fitting = f"{below} or {above}" if below else f"{above}"
        found.append(
            f"a batch of {rows} does not divide over {replicas} replicas, so each replica computes "
            f"all of it: use --batch {fitting}"
        )
    elif is_split and rows // replicas <= SMALL_BATCH:
        each = "1 sample" if rows == replicas else f"{rows // replicas} samples"
        found.append(
            f"each replica has {each} of a batch of {rows}, too few for good "
            f"performance: {use} {8 * replicas} or more"
        )
    return found
