"""Discovery, takeover and end of clusters whose notebook has ended."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import psutil

from nbdist.cluster.forkserver.client import ForkServerProcess
from nbdist.cluster.forkserver.control_socket import KERNEL, connect_in
from nbdist.cluster.handover import clusters_folder, read_handover
from nbdist.errors import NbdistError, OwnedError, StartError, UsageError, VersionError
from nbdist.records import CLUSTER_ID, HandoverState
from nbdist.session.cluster import Cluster
from nbdist.settings import Settings
from nbdist.utils.processes import await_ends, is_gone, this_process
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records import Writer

_END_S = 3.0


@dataclass(frozen=True)
class Found:
    """A cluster that another process of this user started.

    Attributes:
        folder: the folder of the cluster.
        handover: the stored state of the cluster.
    """

    folder: Path
    handover: HandoverState

    @property
    def is_owned(self) -> bool:
        """True if a running kernel of a notebook owns the cluster."""
        return not self.handover.detached_runner and not is_gone(self.handover.owner)

    @property
    def runs(self) -> bool:
        """True if the fork server responds. Then the cluster can be taken over."""
        return _answers(self.folder)

    def __str__(self) -> str:
        workers = formatting.count(len(self.handover.request.hosts), "worker")
        cell = self.handover.cell
        doing = f", cell {cell.request.label} running" if cell else ""
        return f"cluster {self.handover.id} ({workers}{doing})"


def _answers(folder: Path) -> bool:
    """Return True if the fork server of a cluster accepts connections."""
    with contextlib.suppress(OSError):
        connect_in(folder).close()
        return True
    return False


def attach(cluster: str = "") -> Cluster:
    """Take over a cluster whose notebook has ended. `Cluster.follow` shows its running cell.

    Args:
        cluster: Id of the cluster. Default: the only cluster.

    Returns:
        The cluster. Cells can run when `follow` has returned.

    Raises:
        UsageError: No such cluster exists, or several exist and `cluster` is empty.
        OwnedError: Another notebook's kernel owns the cluster.
        VersionError: Another version of nbdist started the cluster, and no notebook owns it.
        StartError: The cluster cannot be reached.
    """
    there = [found for found in _found() if cluster in ("", found.handover.id) and found.runs]
    free = [found for found in there if not found.is_owned]
    if len(free) > 1:
        ids = "\n".join(f"  {found}" for found in free)
        raise UsageError(f"found {len(free)} clusters: run %dist_attach with an id\n{ids}")
    if not free:
        raise _refusal(cluster, [found.handover.owner.pid for found in there])
    return Cluster.adopt(free[0].folder, Settings.from_environment())


def _refusal(cluster: str, owners: list[int]) -> NbdistError:
    """Return the error of an attach that finds no free cluster of this version.

    Args:
        cluster: the id of the requested cluster; empty for any.
        owners: the pids of the kernels that own clusters of this version.
    """
    for error in _of_other_versions(cluster):
        if error.owner_pid is None:
            return error
        owners = [*owners, error.owner_pid]
    if owners:
        return OwnedError(owners[0])
    which = f"no cluster {cluster}" if cluster else "no cluster of an earlier notebook"
    return UsageError(f"found {which}: run %dist_start 4 hosts for a new one")


def offer() -> str:
    """Return a message on the clusters without an owner, in lines; empty without such clusters."""
    lines = []
    waiting = [str(found) for found in _found() if not found.is_owned and found.runs]
    if waiting:
        verb = "are" if len(waiting) > 1 else "is"
        lines.append(
            f"{', '.join(waiting)} of an earlier notebook {verb} still running: "
            "run %dist_attach to take over, or %dist_stop --all to end"
        )
    lines += [str(error) for error in _of_other_versions() if error.owner_pid is None]
    return "\n".join(f"nbdist: {line}" for line in lines)


def stop_all() -> tuple[str, ...]:
    """End the processes of earlier sessions, and delete their folders.

    nbdist ends only its own processes. The fork server of a cluster ends its children. If the fork
    server has died, nbdist identifies the processes by pid and start time. Clusters of running
    kernels are not ended.

    Returns:
        A message for each cluster.
    """
    return tuple(filter(None, map(_end, _folders())))


def _end(folder: Path) -> str:
    try:
        ForkServerProcess.take_over(folder, KERNEL).close()
    except OwnedError as error:
        return f"cluster {folder.name} belongs to another notebook (pid {error.pid}): left alone"
    except StartError:  # its fork server has died
        try:
            handover = read_handover(folder)
        except VersionError as error:
            return f"{folder} of {error.started_by} is left alone: none of its processes responds"
        except (OSError, msgspec.DecodeError) as error:
            return f"{folder} is left alone, because it cannot be read: {error}"
        if not is_gone(handover.owner):
            return f"cluster {folder.name} belongs to pid {handover.owner.pid}: left alone"
        _end_processes(handover.controllers)
    shutil.rmtree(folder, ignore_errors=True)
    return f"cluster {folder.name} was ended"


def _end_processes(processes: tuple[Writer, ...]) -> None:
    """End processes. A process that reuses the pid of an ended one is not touched."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(process.pid)
            if not is_gone(process):  # checked last: `one` has stored its start time by now
                running.append(one)
    for one in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in await_ends(running, _END_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def _folders() -> Iterator[Path]:
    """Yield the folders of the clusters of all sessions. Links and other files are skipped."""
    root = clusters_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if re.fullmatch(CLUSTER_ID, folder.name, re.ASCII) and not folder.is_symlink():
            yield folder


def _found() -> Iterator[Found]:
    """Yield the clusters of other processes. Unreadable folders are skipped."""
    own = this_process()
    for folder in _folders():
        with contextlib.suppress(OSError, VersionError, msgspec.DecodeError):
            handover = read_handover(folder)
            if handover.owner != own:
                yield Found(folder, handover)


def _of_other_versions(cluster: str = "") -> Iterator[VersionError]:
    """Yield an error for each running cluster of another version; `cluster` selects one id."""
    for folder in _folders():
        if cluster in ("", folder.name) and _answers(folder):
            try:
                read_handover(folder)
            except VersionError as error:
                yield error
            except (OSError, msgspec.DecodeError):
                continue
