"""The cluster that is there, in a file, for whoever looks from another process."""

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
    """`cluster.json` in the cluster's folder, with which it goes.

    Args:
        folder: the cluster's; its name is the cluster's id.
        frameworks: what its workers load.
        files: write it.
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
        """Say how the cluster is.

        Args:
            workers: the ranks, in their order.
            run: the id of the run that is under way; empty between runs.
        """
        self._write(workers=workers, run=run)

    def begin(self, run: str, ranks: Collection[int]) -> None:
        """Say that a run is under way; nothing else of the workers is looked at again.

        Args:
            run: its id.
            ranks: those that are in it.
        """
        workers = tuple(
            msgspec.structs.replace(worker, state="busy") if worker.rank in ranks else worker
            for worker in self._state.workers
        )
        self._write(workers=workers, run=run)

    def show(self, names: tuple[str, ...], html: str) -> None:
        """Say where arrays are, for a tab of the browser.

        Args:
            names: as asked for.
            html: the picture.
        """
        with contextlib.suppress(OSError):  # a full disk stops nothing
            replace_file(self._folder / PLACEMENT_FILE, html.encode())
            self._write(placement=ShownPlacement(names=names, at=time.time()))

    def _write(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        content = msgspec.json.encode(self._state)
        self._files.replace(self._folder / "cluster.json", content, 0o666)


def _this_kernel() -> str:
    """The kernel's id, as its connection file is named by Jupyter's server; empty without one."""
    if kernel_app() is None:
        return ""
    return Path(get_connection_file()).stem.removeprefix("kernel-")
