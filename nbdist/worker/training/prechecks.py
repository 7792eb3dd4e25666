"""Whether ranks that should have the same have it: data and state, before the first step.

What differs would be trained on in silence: samples seen twice or never, weights of each rank's
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.errors import StepError
from nbdist.worker.checkpoint.digest import of_arrays
from nbdist.worker.data.batches import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.data.batches import Batch


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
