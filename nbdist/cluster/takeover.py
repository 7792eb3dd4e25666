"""What a cluster's owner leaves to its successor, and how that takes it up."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from jupyter_core.paths import jupyter_runtime_dir

from nbdist._version import __version__
from nbdist.cluster.handover import read_handover
from nbdist.errors import StartError
from nbdist.records import HandoverState
from nbdist.utils.processes import is_gone, process_of, this_process

if TYPE_CHECKING:
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.records import ClusterRequest


def clusters_folder() -> Path:
    """Where each cluster of this user has a folder."""
    return Path(jupyter_runtime_dir()) / "nbdist"


def new_folder() -> Path:
    """A folder for one cluster, open to this user only."""
    folder = clusters_folder() / secrets.token_hex(6)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "log").mkdir(mode=0o700)
    (folder / "security").mkdir(mode=0o700)
    return folder


def new_handover(folder: Path, request: ClusterRequest, worker_group: WorkerGroup) -> HandoverState:
    """Of a cluster that is about to be started."""
    return HandoverState(
        id=folder.name,
        nbdist=__version__,
        request=request,
        owner=this_process(),
        stream=worker_group.receiver.bound_socket,
        dispatch=worker_group.dispatcher.bound_socket,
    )


def of_worker_group(worker_group: WorkerGroup) -> dict[str, object]:
    """What of the handover state is another whenever engines, or their collectives, are."""
    return {
        "hellos": tuple(worker_group.hellos[rank] for rank in sorted(worker_group.hellos)),
        "ledger": worker_group.engines.ledger(),
        "collectives": worker_group.collectives.ledger(),
    }


def controllers_of(worker_group: WorkerGroup) -> dict[str, object]:
    """What of the handover state is another after each start."""
    pids = worker_group.engines.controller.pids
    return {"controllers": tuple(filter(None, map(process_of, pids)))}


def inherit(folder: Path, *, detached_runner: bool) -> HandoverState:
    """What the former owner left, with this process as the owner.

    Raises:
        StartError: it cannot be read, or the cluster had not been started yet.
    """
    try:
        handover = read_handover(folder)
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(
            f"the cluster in {folder} cannot be taken over ({error}): type %dist_stop --all"
        ) from None
    if not handover.hellos:
        raise StartError(
            f"the cluster in {folder} had not been started when its notebook ended: "
            "type %dist_stop --all"
        )
    return msgspec.structs.replace(handover, owner=this_process(), detached_runner=detached_runner)


def take_up(handover: HandoverState, worker_group: WorkerGroup) -> None:
    """Use the processes that there are, each only if it is the very one."""
    controllers = [process.pid for process in handover.controllers if not is_gone(process)]
    there = bool(handover.controllers) and not is_gone(handover.controllers[0])
    worker_group.hellos = {hello.rank: hello for hello in handover.hellos}
    worker_group.engines.take_over(handover.ledger, controllers, answers=there)
    worker_group.collectives.take_over(handover.collectives)
    if handover.cell is not None and handover.cell.detached:
        worker_group.detach(on=True)
