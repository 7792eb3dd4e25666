"""File with the state of the cluster, for other processes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from ipykernel.connect import get_connection_file

from nbdist.records import ClusterState, ShownPlacement, WorkerState
from nbdist.telemetry.frontend_request import kernel_app
from nbdist.utils.files import PLACEMENT_FILE, replace_file
from nbdist.utils.processes import this_process

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.utils.files import LateFiles


class ClusterFile:
    """Writer of `cluster.json` in the folder of the cluster.

    Args:
        folder: folder of the cluster. Its name is the cluster's id.
        frameworks: frameworks that the workers load.
        files: writer of the files.
    """

    def __init__(self, folder: Path, frameworks: tuple[str, ...], files: LateFiles) -> None:
        self._folder = folder
        self._files = files
        self._state = ClusterState(
            id=folder.name,
            frameworks=frameworks,
            workers=(),
            run="",
            writer=this_process(),
            kernel=_this_kernel(),
        )

    def write(self, workers: tuple[WorkerState, ...], run: str) -> None:
        """Write the state of the cluster.

        Args:
            workers: workers, ordered by rank.
            run: id of the active run, empty between runs.
        """
        self._write(workers=workers, run=run)

    def begin(self, run: str, ranks: Collection[int]) -> None:
        """Write the start of a run. The other fields of the workers stay unchanged.

        Args:
            run: id of the run.
            ranks: ranks that take part.
        """
        workers = tuple(
            msgspec.structs.replace(worker, state="busy") if worker.rank in ranks else worker
            for worker in self._state.workers
        )
        self._write(workers=workers, run=run)

    def show(self, names: tuple[str, ...], html: str) -> None:
        """Write the placement of arrays, for a tab of the browser.

        Args:
            names: requested names.
            html: picture of the placement.
        """
        with contextlib.suppress(OSError):  # a full disk must not stop the cell
            replace_file(self._folder / PLACEMENT_FILE, html.encode())
            pids = tuple(worker.pid for worker in self._state.workers)
            self._write(placement=ShownPlacement(names=names, at=time.time(), pids=pids))

    def _write(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        content = msgspec.json.encode(self._state)
        self._files.replace(self._folder / "cluster.json", content, 0o666)


def _this_kernel() -> str:
    """Return the kernel id from the name of the connection file. Empty if there is no kernel."""
    if kernel_app() is None:
        return ""
    return Path(get_connection_file()).stem.removeprefix("kernel-")
