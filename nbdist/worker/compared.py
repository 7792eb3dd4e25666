"""Comparison of a plain cell's values over ranks: each rank sends digests to the notebook.

Under pjrt these are the replicated arrays (`worker/replicated.py`), under mirrored the mirrored
variables (`worker/mirrored_variables.py`). `nbdist/drift.py` compares the digests, without a
collective.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from nbdist.records import Replicated
from nbdist.worker.digest import of_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.records import StrategyName
    from nbdist.worker.state import Worker

Value = TypeVar("Value")


class Compared(Protocol):
    """The values of one rank under one strategy."""

    def under(self, names: Iterable[str], namespace: dict[str, Any]) -> tuple[Replicated, ...]:
        """Digest the values that names lead to."""
        ...


_log = logging.getLogger(__name__)


def look(worker: Worker, namespace: dict[str, Any]) -> tuple[Replicated, ...]:
    """Digest the values of a cell that has ended.

    With `--guard 0` too: a later cell then reports only its own changes.

    Args:
        worker: the rank.
        namespace: the user's.
    """
    if worker.world_size == 1 or worker.strategy is None:
        return ()
    if worker.strategy not in worker.compared:
        worker.compared[worker.strategy] = _compared(worker.strategy)
    found = worker.compared[worker.strategy].under(worker.names.bound(), namespace)
    return found if worker.guard else ()


def _compared(strategy: StrategyName) -> Compared:
    if strategy == "pjrt":
        from nbdist.worker.replicated import ReplicatedArrays

        return ReplicatedArrays()
    from nbdist.worker.mirrored_variables import MirroredVariables

    return MirroredVariables()


def digest_of(name: str, numbers: Mapping[str, int], *, changed: bool) -> Replicated | None:
    """The record of a name.

    Args:
        name: in the user's namespace.
        numbers: the digest of each value by its path.
        changed: the cell has changed one of them.

    Returns:
        None if the name leads to no value.
    """
    if not numbers:
        return None
    whole = of_array(np.array(list(numbers.values()), np.int32))
    return Replicated(name=name, number=whole, changed=changed, parts=dict(numbers))


def found_under(name: str, values: Iterable[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """The values under a name; empty, with a warning, if an object raises when it is searched."""
    try:
        return list(values)
    except Exception as error:  # noqa: BLE001 - any exception of a user's object
        _log.warning("`%s` is not compared over ranks: %s", name, error)
        return []
