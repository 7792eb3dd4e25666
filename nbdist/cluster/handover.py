"""Handover state: the data that a successor needs to take over a running cluster.

Only this user can read its file.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from jupyter_core.paths import jupyter_runtime_dir

from nbdist._version import __version__
from nbdist.errors import StartError, VersionError
from nbdist.records import CLUSTER_ID, HANDOVER_VERSION, HandoverState, Writer
from nbdist.utils.files import read_file
from nbdist.utils.processes import is_gone, process_of, this_process

if TYPE_CHECKING:
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.records import CellRequest, ClusterRequest, LostRanks, RunningCell
    from nbdist.utils.files import LateFiles


HANDOVER_FILE = "handover.json"
"""File of the handover state. It contains the secret keys of the engines' sockets."""

_OLD_FILE = "estate.json"
"""Name of the file before nbdist 0.2.0."""

_MOST_BYTES = 64_000_000


class _Origin(msgspec.Struct):
    """Version and owner of a cluster, in every version of the format.

    Attributes:
        nbdist: version of nbdist; empty in version 1.
        owner: the `Writer` that owns the cluster. Other content is ignored.
        detached_runner: true if the owner is not the kernel of a notebook.
        detached_runner_before: the same in version 1.
    """

    version: int
    nbdist: str = ""
    owner: object = None
    detached_runner: object = False
    detached_runner_before: object = msgspec.field(default=False, name="keeper")

    def started_by(self) -> str:
        """Return a phrase with the version of nbdist."""
        return f"nbdist {self.nbdist}" if self.nbdist else "a version of nbdist before 0.2.0"

    def owner_pid(self) -> int | None:
        """Return the pid of the running kernel that owns the cluster; None without an owner."""
        if not (self.detached_runner or self.detached_runner_before):
            with contextlib.suppress(msgspec.ValidationError):
                owner = msgspec.convert(self.owner, Writer)
                return None if is_gone(owner) else owner.pid
        return None


class HandoverFile:
    """The file `handover.json` in the cluster's folder.

    Args:
        folder: the cluster's folder.
        handover: the current state. The constructor writes it.
        files: the writer of files.

    Attributes:
        handover: the current state. A change may be written later.
    """

    def __init__(self, folder: Path, handover: HandoverState, files: LateFiles) -> None:
        self.handover = handover
        self._folder = folder
        self._files = files
        self.update()

    def update(self, **changes: object) -> None:
        """Change fields of the state, and write the file."""
        self.handover = msgspec.structs.replace(self.handover, **changes)
        self._files.replace(self._folder / HANDOVER_FILE, msgspec.json.encode(self.handover), 0o600)

    def begin(self, cell: RunningCell, ran: tuple[str, ...]) -> None:
        """Set the running cell. `sent` writes the file soon afterwards.

        Args:
            cell: the running cell.
            ran: the sources of all cells so far, including this one.
        """
        self.handover = msgspec.structs.replace(self.handover, cell=cell, ran=ran)

    def opened(self, saved: tuple[str, ...]) -> None:
        """Set the names whose values the checkpoints of the running cell contain."""
        cell = self.handover.cell
        if cell is not None:
            self.update(cell=msgspec.structs.replace(cell, saved=saved))

    def shrunk(self, ranks: tuple[int, ...]) -> None:
        """Set the ranks that continue the running cell. `sent` writes the file."""
        if self.handover.cell is not None:
            cell = msgspec.structs.replace(self.handover.cell, ranks=ranks)
            self.handover = msgspec.structs.replace(self.handover, cell=cell)

    def lose(self, loss: LostRanks) -> None:
        """Record, on disk, that ranks are about to be replaced. `sent` clears the record."""
        self.update(loss=loss)
        self._files.settle()

    def sent(self, request: CellRequest, **changes: object) -> None:
        """Record that the running cell is about to be sent, for the first time or after a recovery.

        If the cell may outlive this process, wait until the file is on disk.
        """
        cell = self.handover.cell
        if cell is not None:
            cell = msgspec.structs.replace(cell, request=request)
        self.update(cell=cell, cells=request.number, loss=None, **changes)
        if cell is not None and cell.detached:
            self._files.settle()

    def settle(self, **changes: object) -> None:
        """Record that no cell runs any more."""
        previous = self.handover
        self.update(cell=None, last=previous.cell or previous.last, **changes)


def read_handover(folder: Path) -> HandoverState:
    """Read the handover state in a cluster's folder.

    Raises:
        OSError: there is no file, or another user owns or can change it.
        VersionError: another version of nbdist started the cluster.
        msgspec.DecodeError: the content is invalid, or belongs to another cluster.
    """
    path = folder / HANDOVER_FILE
    if not path.exists() and (folder / _OLD_FILE).exists():
        path = folder / _OLD_FILE
    content = read_file(path, _MOST_BYTES, own=True)
    origin = msgspec.json.decode(content, type=_Origin)
    started_by, own = origin.started_by(), f"nbdist {__version__}"
    if origin.version != HANDOVER_VERSION:
        started_by += f" (state format {origin.version})"
        own += f" (state format {HANDOVER_VERSION})"
    if started_by != own:
        raise VersionError(folder.name, started_by, own, origin.owner_pid())
    handover = msgspec.json.decode(content, type=HandoverState)
    if handover.id != folder.name or not re.fullmatch(CLUSTER_ID, handover.id, re.ASCII):
        raise msgspec.DecodeError(f"{folder} is not the folder of cluster {handover.id}")
    return handover


def clusters_folder() -> Path:
    """Return the folder that contains the folder of each cluster of this user."""
    return Path(jupyter_runtime_dir()) / "nbdist"


def new_folder() -> Path:
    """Create a folder for one cluster, accessible to this user only."""
    folder = clusters_folder() / secrets.token_hex(6)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "log").mkdir(mode=0o700)
    (folder / "security").mkdir(mode=0o700)
    return folder


def new_handover(folder: Path, request: ClusterRequest, worker_group: WorkerGroup) -> HandoverState:
    """Create the handover state of a cluster that is about to start."""
    return HandoverState(
        id=folder.name,
        nbdist=__version__,
        request=request,
        owner=this_process(),
        stream=worker_group.receiver.bound_socket,
        dispatch=worker_group.dispatcher.bound_socket,
    )


def of_worker_group(worker_group: WorkerGroup) -> dict[str, object]:
    """Return the fields of the handover state that change with the engines or collectives."""
    return {
        "hellos": tuple(worker_group.hellos[rank] for rank in sorted(worker_group.hellos)),
        "ledger": worker_group.engines.ledger(),
        "collectives": worker_group.collectives.ledger(),
    }


def controllers_of(worker_group: WorkerGroup) -> dict[str, object]:
    """Return the fields of the handover state that change with each start of the controller."""
    pids = worker_group.engines.controller.pids
    return {"controllers": tuple(filter(None, map(process_of, pids)))}


def inherit(folder: Path, *, detached_runner: bool) -> HandoverState:
    """Read the handover state of the former owner, and set this process as the owner.

    Raises:
        StartError: the state cannot be read, or the start of the cluster had not finished.
    """
    try:
        handover = read_handover(folder)
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(
            f"the cluster in {folder} cannot be taken over ({error}): run %dist_stop --all"
        ) from None
    if not handover.hellos:
        raise StartError(
            f"the start of the cluster in {folder} had not finished when its notebook ended: "
            "run %dist_stop --all"
        )
    return msgspec.structs.replace(handover, owner=this_process(), detached_runner=detached_runner)


def take_up(handover: HandoverState, worker_group: WorkerGroup) -> None:
    """Take over the processes of the cluster that still run."""
    controllers = [process.pid for process in handover.controllers if not is_gone(process)]
    there = bool(handover.controllers) and not is_gone(handover.controllers[0])
    worker_group.hellos = {hello.rank: hello for hello in handover.hellos}
    worker_group.engines.take_over(handover.ledger, controllers, answers=there)
    worker_group.collectives.take_over(handover.collectives)
    if handover.cell is not None and handover.cell.detached:
        worker_group.detach(on=True)
