"""Comparison of a plain cell's values over ranks: each rank sends digests to the notebook.

Under pjrt these are the replicated arrays (`worker/replicated.py`), under mirrored the mirrored
variables (`worker/mirrored_variables.py`). `nbdist/drift.py` compares the digests, without a
collective.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nbdist.records import Replicated
from nbdist.worker.digest import of_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nbdist.worker.state import Worker

    Look = Callable[[], tuple[Replicated, ...]]

Value = TypeVar("Value")
_log = logging.getLogger(__name__)


def begin(worker: Worker, namespace: dict[str, Any]) -> Look:
    """Prepare the comparison of the cell that begins.

    Args:
        worker: the rank.
        namespace: the user's.

    Returns:
        A function that digests the cell's values. Call it when the cell has ended.
    """
    if worker.world_size > 1 and worker.strategy == "pjrt":
        return lambda: _arrays(worker, namespace)
    if worker.world_size > 1 and worker.strategy == "mirrored" and worker.guard:
        from nbdist.worker.mirrored_variables import MirroredVariables

        variables = MirroredVariables(worker.names.bound(), namespace)
        return lambda: variables.under(worker.names.bound(), namespace)
    return lambda: ()


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
    return Replicated(name=name, number=whole, parts=dict(numbers) if changed else {})


def found_under(name: str, values: Iterable[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """The values under a name; empty, with a warning, if an object raises when it is searched."""
    try:
        return list(values)
    except Exception as error:  # noqa: BLE001 - any exception of a user's object
        _log.warning("`%s` is not compared over ranks: %s", name, error)
        return []


def _arrays(worker: Worker, namespace: dict[str, Any]) -> tuple[Replicated, ...]:
    """Digest the arrays with `--guard 0` too: a later cell then reports only its own changes."""
    from nbdist.worker.replicated import ReplicatedArrays

    if worker.replicated is None:
        worker.replicated = ReplicatedArrays()
    found = worker.replicated.under(worker.names.bound(), namespace)
    return found if worker.guard else ()
