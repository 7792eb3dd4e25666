"""Comparison of a plain cell's values over ranks: each rank sends digests to the notebook.

Under pjrt these are the replicated arrays (`worker/inspection/replicated.py`), under mirrored the
mirrored variables (`worker/tensorflow/mirrored_variables.py`). `nbdist/execution/divergence.py`
compares the digests, without a collective.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import Replicated, StrategyName
    from nbdist.worker.runtime.context import Worker


class Reported(Protocol):
    """The values of one rank under one strategy."""

    def under(self, names: Iterable[str], namespace: dict[str, Any]) -> tuple[Replicated, ...]:
        """Digest the values that names lead to."""
        ...


def look(worker: Worker, namespace: dict[str, Any]) -> tuple[Replicated, ...]:
    """Digest the values of a cell that has ended.

    With `--guard 0` too: a later cell then reports only its own changes.

    Args:
        worker: the rank.
        namespace: the user's.
    """
    if worker.world_size == 1 or worker.strategy is None:
        return ()
    found = _values_under(worker.strategy).under(worker.cell_state.names.bound(), namespace)
    return found if worker.request.guard else ()


@functools.cache
def _values_under(strategy: StrategyName) -> Reported:
    if strategy == "pjrt":
        from nbdist.worker.inspection.replicated import ReplicatedArrays

        return ReplicatedArrays()
    from nbdist.worker.tensorflow.mirrored_variables import MirroredVariables

    return MirroredVariables()
