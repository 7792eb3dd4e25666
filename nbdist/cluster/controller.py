"""ipyparallel's controller of one cluster, and this process's client of it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import ipyparallel
import psutil
from traitlets.config import Config

from nbdist.cluster.launcher import ForkServerEngineSetLauncher
from nbdist.errors import StartError
from nbdist.utils.processes import await_ends, is_alive

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.cluster.fleet import Fleet

CONTROLLER_ARGS = (
    "--HeartMonitor.period=100",  # an engine is registered a beat after its first
    "--HeartMonitor.max_heartmonitor_misses=100",
    # A busy machine answers late; the defaults (5 s and 10 s) then lose engines for good:
    # https://github.com/ipython/ipyparallel/issues/700
    "--IPController.registration_timeout=300",
    "--IPController.broadcast_scheduler_depth=0",
    "--nodb",
    "--log-level=WARN",  # by default the hub writes a line for each request
)
_CLUSTER_ID = "nbdist"
_CLIENT_S = 10.0
_SCHEDULERS_S = 0.5


class Controller:
    """It has processes of its own, which the fork server ends with the rest.

    Args:
        folder: for connection files and logs.
        fleet: ends it when this process is gone, and is told of it.

    Attributes:
        cluster: ipyparallel's own account of it all.
        client: None where there is no controller.
    """

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.client: Any = None
        self._folder = folder
        self._fleet = fleet
        self._processes: list[psutil.Process] = []
        self.cluster = ipyparallel.Cluster(
            profile_dir=str(folder),
            load_profile=False,
            config=Config(),
            log=logging.getLogger("nbdist.ipyparallel"),
            cluster_id=_CLUSTER_ID,
            delay=0,
            engine_launcher_class=ForkServerEngineSetLauncher,
            controller_args=list(CONTROLLER_ARGS),
            shutdown_atexit=False,  # a run may outlive this process
        )

    @property
    def pids(self) -> list[int]:
        """The controller's, then those of its schedulers."""
        return [process.pid for process in self._processes]

    @property
    def runs(self) -> bool:
        """Whether there is a client, and what it speaks to."""
        return self.client is not None and any(map(is_alive, self._processes[:1]))

    def start(self) -> str:
        """Start it, and connect to it."""
        for stale in (self._folder / "security").glob(f"ipcontroller-{_CLUSTER_ID}-*.json"):
            stale.unlink()  # of one that was killed
        self.cluster.start_controller_sync()
        process = psutil.Process(self.cluster.controller.pid)
        self._guard(process)
        try:
            self.client = self.cluster.connect_client_sync()
        except Exception as error:
            raise StartError(f"the controller did not answer: {error}") from error
        self._fleet.introduce(self.file("engine"))
        return f"pid {process.pid}"

    def take_over(self, pids: list[int], *, answers: bool) -> None:
        """Use the one that another process has started; of one that is gone, end what is left.

        Args:
            pids: its processes that run.
            answers: the controller is the first of these.
        """
        missing = psutil.NoSuchProcess, OSError, ipyparallel.TimeoutError
        with contextlib.suppress(*missing):
            self._processes = [psutil.Process(pid) for pid in pids]
            if answers:
                self.client = ipyparallel.Client(str(self.file("client")), timeout=_CLIENT_S)

    def file(self, whose: str) -> Path:
        """How `engine` or `client` reach it."""
        return self._folder / "security" / f"ipcontroller-{_CLUSTER_ID}-{whose}.json"

    def guard_schedulers(self) -> None:
        """They are processes of their own, which outlive it when it is killed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._processes[0].children(recursive=True):
                if process not in self._processes:
                    self._guard(process)

    def _guard(self, process: psutil.Process) -> None:
        self._fleet.home.guard(process.pid)
        self._processes.append(process)

    def new_launcher(self, **own: Any) -> ForkServerEngineSetLauncher:
        """What drives engines that are there, as ipyparallel makes it for those that it starts."""
        cluster = self.cluster
        launcher = ForkServerEngineSetLauncher(
            work_dir=".",
            parent=cluster,
            log=cluster.log,
            profile_dir=cluster.profile_dir,
            cluster_id=cluster.cluster_id,
            **own,
        )
        cluster.engines[own["engine_set_id"]] = launcher
        return launcher

    def close_client(self) -> None:
        if self.client is not None:
            self.client.close()

    def close(self) -> None:
        """End it and the engines that it knows, also when parts have died."""
        with contextlib.ExitStack() as steps:
            steps.callback(self._end_schedulers)
            steps.callback(self.cluster.stop_controller_sync)
            steps.callback(self.cluster.stop_engines_sync)
            steps.callback(self.close_client)

    def _end_schedulers(self) -> None:
        """They are left when it was killed, and the fork server that would end them too."""
        for process in await_ends(self._processes, _SCHEDULERS_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await_ends(self._processes, _SCHEDULERS_S)
