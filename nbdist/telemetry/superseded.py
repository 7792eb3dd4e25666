"""Which reports still hold in a run that was recovered."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from nbdist.records import PLACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.records import Metrics, RecoveryRecord

_EPOCH, _STEP, _TIME = (PLACE.index(name) for name in ("epoch", "step", "time_s"))


def standing(places: np.ndarray, recoveries: Iterable[RecoveryRecord]) -> np.ndarray:
    """Those that are of no step that had to be made again, nor of an epoch with such a step.

    Args:
        places: where and when reports were made: shape (reports, len(PLACE)), float64.
        recoveries: of the run.

    Returns:
        Shape (reports,), bool.
    """
    epoch, step, time_s = places[:, [_EPOCH, _STEP, _TIME]].T
    stands = np.ones(len(places), bool)
    for recovery in recoveries:
        before = time_s < recovery.time_s
        lost = before & (step > recovery.step)
        of_epochs = (step < 0) & (epoch >= 0)
        stands &= ~(lost | (before & of_epochs & np.isin(epoch, epoch[lost])))
    return stands


def without_superseded(
    metrics: Sequence[Metrics], recoveries: Sequence[RecoveryRecord]
) -> tuple[Metrics, ...]:
    """The reports that still hold, in their order."""
    if not recoveries or not metrics:
        return tuple(metrics)
    places = np.array([(m.rank, m.epoch, m.step, m.time_s) for m in metrics], float)
    return tuple(compress(metrics, standing(places, recoveries)))
