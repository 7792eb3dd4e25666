"""Export of a training as a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import TransferError, UsageError
from nbdist.jobs import folder
from nbdist.jobs.program import program_of
from nbdist.session.transfer import read_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.cells.dependencies import Entry
    from nbdist.records import ClusterRequest


def write_program(
    path: str, cluster: ClusterRequest, entries: Callable[[], Sequence[Entry]]
) -> int:
    """Write a training to a new folder. See `Cluster.export`.

    Args:
        path: the folder.
        cluster: request of the cluster on which the cells ran.
        entries: returns the needed cells and pushed objects, and last the cell that trains.

    Returns:
        The execution count of the cell that trains.

    Raises:
        UsageError: see `Cluster.export`.
    """
    target = folder.check_target(path)
    program = program_of(entries(), cluster, _read)
    folder.write(target, program, cluster)
    return program.label


def _read(payload: bytes) -> Mapping[str, object]:
    try:
        return read_objects(payload)
    except TransferError as error:
        raise UsageError(
            f"cannot export an object that was copied from the notebook ({error}): create it in a "
            "%%dist_run cell"
        ) from None
