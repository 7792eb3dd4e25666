"""Clusters whose notebook is gone: found, taken over, ended."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import psutil

from nbdist.cluster.forkserver.client import ForkServerProcess
from nbdist.cluster.forkserver.control_socket import FORK_SERVER_SOCKET, KERNEL, connect
from nbdist.cluster.handover import clusters_folder, read_handover
from nbdist.errors import OwnedError, StartError, UsageError, VersionError
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
    """A cluster that some process of this user started.

    Attributes:
        folder: its folder.
        handover: what its owner has left, or would.
    """

    folder: Path
    handover: HandoverState

    @property
    def is_owned(self) -> bool:
        """Whether a notebook's kernel has it."""
        return not self.handover.detached_runner and not is_gone(self.handover.owner)

    @property
    def runs(self) -> bool:
        """Whether it can be taken over: its seed answers."""
        return _answers(self.folder)

    def __str__(self) -> str:
        workers = formatting.count(len(self.handover.request.hosts), "worker")
        cell = self.handover.cell
        doing = f", cell {cell.request.label} under way" if cell else ""
        return f"cluster {self.handover.id} ({workers}{doing})"


def _answers(folder: Path) -> bool:
    """Return True if the fork server of a cluster accepts connections."""
    with contextlib.suppress(OSError):
        connect(folder / FORK_SERVER_SOCKET).close()
        return True
    return False


def attach(cluster: str = "") -> Cluster:
    """Take over a cluster whose notebook is gone; `Cluster.follow` shows its cell under way.

    Args:
        cluster: its id; left out, the one that there is.

    Raises:
        UsageError: there is none, or several, of which none was named.
        OwnedError: another notebook's kernel has it.
        VersionError: another version of nbdist started it.
        StartError: it cannot be reached.
    """
    there = [found for found in _found() if cluster in ("", found.handover.id) and found.runs]
    free = [found for found in there if not found.is_owned]
    if len(free) > 1:
        ids = "\n".join(f"  {found}" for found in free)
        raise UsageError(f"there are {len(free)} clusters: type %dist_attach with an id\n{ids}")
    if not there:
        for error in _of_other_versions(cluster):
            raise error
        which = f"no cluster {cluster}" if cluster else "no cluster of an earlier notebook"
        raise UsageError(f"there is {which}: type %dist_start 4 hosts for a new one")
    if not free:
        raise OwnedError(there[0].handover.owner.pid)
    return Cluster.adopt(free[0].folder, Settings.from_environment())


def offer() -> str:
    """A line on the clusters that wait for a notebook; empty where there is none."""
    waiting = [str(found) for found in _found() if not found.is_owned and found.runs]
    if not waiting:
        return "\n".join(f"nbdist: {error}" for error in _of_other_versions())
    verb = "are" if len(waiting) > 1 else "is"
    return (
        f"nbdist: {', '.join(waiting)} of an earlier notebook {verb} there: "
        "%dist_attach takes over, %dist_stop --all ends"
    )


def stop_all() -> tuple[str, ...]:
    """End what earlier sessions have left: processes, and folders.

    Only what nbdist started: the seed answers on its socket in the cluster's folder, and ends its
    own; where it is gone, what it guarded is known by its start as well as by its pid. What a
    living kernel has is left alone.

    Returns:
        What was done, line by line.
    """
    return tuple(filter(None, map(_end, _folders())))


def _end(folder: Path) -> str:
    try:
        ForkServerProcess.take_over(folder, KERNEL).close()
    except OwnedError as error:
        return f"cluster {folder.name} belongs to another notebook (pid {error.pid}): left alone"
    except StartError:  # its seed is gone
        try:
            handover = read_handover(folder)
        except VersionError as error:
            origin = error.started_by or "a version before 0.2.0"
            return f"{folder} of nbdist {origin} is left alone: no process of it answers"
        except (OSError, msgspec.DecodeError) as error:
            return f"{folder} is left alone, as it cannot be read: {error}"
        if not is_gone(handover.owner):
            return f"cluster {folder.name} belongs to pid {handover.owner.pid}: left alone"
        _end_processes(handover.controllers)
    shutil.rmtree(folder, ignore_errors=True)
    return f"cluster {folder.name} was ended"


def _end_processes(processes: tuple[Writer, ...]) -> None:
    """Each only if it is the very one."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(process.pid)
            if not is_gone(process):  # looked at last: `one` knows its own start from here on
                running.append(one)
    for one in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in await_ends(running, _END_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def _folders() -> Iterator[Path]:
    """One for each cluster, of whatever session; what is none is skipped, as are links."""
    root = clusters_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if re.fullmatch(CLUSTER_ID, folder.name, re.ASCII) and not folder.is_symlink():
            yield folder


def _found() -> Iterator[Found]:
    """The clusters that there are; what cannot be read is skipped."""
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
