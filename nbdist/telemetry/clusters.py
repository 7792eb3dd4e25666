"""The cluster that is there, in a file, for whoever looks from another process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from ipykernel.connect import get_connection_file
from ipykernel.kernelapp import IPKernelApp

from nbdist.records import ClusterState, WorkerState
from nbdist.telemetry.files import replace_file
from nbdist.telemetry.processes import this_process


class ClusterFile:
    """`cluster.json` in the cluster's folder, with which it goes. A full disk stops nothing.

    Args:
        folder: the cluster's; its name is the cluster's id.
        frameworks: what its workers load.
    """

    def __init__(self, folder: Path, frameworks: tuple[str, ...]) -> None:
        self._folder = folder
        self._frameworks = frameworks
        self._writer = this_process()
        self._kernel = _this_kernel()

    def write(self, workers: tuple[WorkerState, ...], run: str) -> None:
        """Say how the cluster is.

        Args:
            workers: the ranks, in their order.
            run: the id of the run that is under way; empty between runs.
        """
        state = ClusterState(
            id=self._folder.name,
            frameworks=self._frameworks,
            workers=workers,
            run=run,
            writer=self._writer,
            kernel=self._kernel,
        )
        with contextlib.suppress(OSError):
            replace_file(self._folder / "cluster.json", msgspec.json.encode(state))


def _this_kernel() -> str:
    """The kernel's id, as its connection file is named by Jupyter's server; empty without one."""
    if not IPKernelApp.initialized():
        return ""
    return Path(get_connection_file()).stem.removeprefix("kernel-")
