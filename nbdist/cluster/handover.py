"""The state that an owner of a cluster leaves to its successor, and its use.

Only this user can read its file.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from jupyter_core.paths import jupyter_runtime_dir

from nbdist._version import __version__
from nbdist.errors import StartError, VersionError
from nbdist.records import CLUSTER_ID, HANDOVER_VERSION, HandoverState
from nbdist.utils.files import read_file
from nbdist.utils.processes import is_gone, process_of, this_process

if TYPE_CHECKING:
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.records import CellRequest, ClusterRequest, Loss, RunningCell
    from nbdist.utils.files import LateFiles


HANDOVER_FILE = "handover.json"
"""It holds the secret keys of the sockets that engines speak to."""

_OLD_FILE = "estate.json"
"""Written before nbdist 0.2.0."""

_MOST_BYTES = 64_000_000


class _Origin(msgspec.Struct):
    """The fields that every format has."""

    version: int
    nbdist: str = ""


class HandoverFile:
    """`handover.json` in the cluster's folder, with which it goes.

    Args:
        folder: the cluster's.
        handover: as it is now; it is written.
        files: write it.

    Attributes:
        handover: as it is, or is being, written.
    """

    def __init__(self, folder: Path, handover: HandoverState, files: LateFiles) -> None:
        self.handover = handover
        self._folder = folder
        self._files = files
        self.update()

    def update(self, **changes: object) -> None:
        """Change fields, and write them all."""
        self.handover = msgspec.structs.replace(self.handover, **changes)
        self._files.replace(self._folder / HANDOVER_FILE, msgspec.json.encode(self.handover), 0o600)

    def begin(self, cell: RunningCell, ran: tuple[str, ...]) -> None:
        """A cell is under way; it is written once it is `sent`, which is soon.

        Args:
            cell: which.
            ran: the texts of all cells so far, this one too.
        """
        self.handover = msgspec.structs.replace(self.handover, cell=cell, ran=ran)

    def opened(self, saved: tuple[str, ...]) -> None:
        """The checkpoints of the cell under way have the values of these names."""
        cell = self.handover.cell
        if cell is not None:
            self.update(cell=msgspec.structs.replace(cell, saved=saved))

    def shrunk(self, ranks: tuple[int, ...]) -> None:
        """The cell under way goes on with these alone; it is written once it is `sent`."""
        if self.handover.cell is not None:
            cell = msgspec.structs.replace(self.handover.cell, ranks=ranks)
            self.handover = msgspec.structs.replace(self.handover, cell=cell)

    def lose(self, loss: Loss) -> None:
        """Ranks are about to be replaced: it is known from here on, until a cell is `sent`."""
        self.update(loss=loss)
        self._files.settle()

    def sent(self, request: CellRequest, **changes: object) -> None:
        """The cell under way is about to be sent, as it is here: again, where it was recovered.

        Of one that may outlive this process, it is known from here on.
        """
        cell = self.handover.cell
        if cell is not None:
            cell = msgspec.structs.replace(cell, request=request)
        self.update(cell=cell, cells=request.number, loss=None, **changes)
        if cell is not None and cell.detached:
            self._files.settle()

    def settle(self, **changes: object) -> None:
        """There is no cell under way any more."""
        former = self.handover
        self.update(cell=None, last=former.cell or former.last, **changes)


def read_handover(folder: Path) -> HandoverState:
    """Read the handover state in a cluster's folder.

    Raises:
        OSError: no file, or another user's.
        VersionError: another version of nbdist started the cluster.
        msgspec.DecodeError: not a handover state, or that of another cluster.
    """
    path = folder / HANDOVER_FILE
    if not path.exists() and (folder / _OLD_FILE).exists():
        raise VersionError(folder.name, "", __version__)
    content = read_file(path, _MOST_BYTES)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} is another user's")
    origin = msgspec.json.decode(content, type=_Origin)
    if (origin.version, origin.nbdist) != (HANDOVER_VERSION, __version__):
        raise VersionError(folder.name, origin.nbdist, __version__)
    handover = msgspec.json.decode(content, type=HandoverState)
    if handover.id != folder.name or not re.fullmatch(CLUSTER_ID, handover.id, re.ASCII):
        raise msgspec.DecodeError(f"{folder} is not the folder of cluster {handover.id}")
    return handover


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
