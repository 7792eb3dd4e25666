"""ipyparallel's controller of one cluster, and the client that connects to it."""

from __future__ import annotations

import contextlib
import logging
import sys
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
    "--HeartMonitor.period=100",  # the hub registers an engine one heartbeat after the first
    "--HeartMonitor.max_heartmonitor_misses=100",
    # Engines on a busy machine respond late. With the defaults (5 s, 10 s) the hub drops them:
    # https://github.com/ipython/ipyparallel/issues/700
    "--IPController.registration_timeout=300",
    "--IPController.broadcast_scheduler_depth=0",
    "--nodb",
    "--log-level=WARN",  # by default the hub writes a line for each request
)
_PROGRAM = (sys.executable, "-m", "nbdist.cluster.remote_host.heart_monitor")
_CLUSTER_ID = "nbdist"
_CLIENT_S = 10.0
_SCHEDULERS_S = 0.5


class Controller:
    """The controller's processes and the client. The fork server ends the processes at exit.

    Args:
        folder: the folder for connection files and logs.
        fleet: the fork servers. They end the controller when this process is gone.

    Attributes:
        cluster: ipyparallel's `Cluster`.
        client: ipyparallel's client; None if there is no controller.
    """

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.client: Any = None
        self._folder = folder
        self._fleet = fleet
        self._processes: list[psutil.Process] = []
        self.cluster = ipyparallel.Cluster(
            profile_dir=str(folder),
            load_profile=False,
            config=Config({"LocalControllerLauncher": {"controller_cmd": list(_PROGRAM)}}),
            log=logging.getLogger("nbdist.ipyparallel"),
            cluster_id=_CLUSTER_ID,
            delay=0,
            engine_launcher_class=ForkServerEngineSetLauncher,
            controller_args=list(CONTROLLER_ARGS),
            shutdown_atexit=False,  # a run may outlive this process
        )

    @property
    def pids(self) -> list[int]:
        """The pids of the controller (first) and of its schedulers."""
        return [process.pid for process in self._processes]

    @property
    def runs(self) -> bool:
        """True if the client is connected and the controller's process runs."""
        return self.client is not None and any(map(is_alive, self._processes[:1]))

    def start(self) -> str:
        """Start the controller, connect to it, and return a text with its pid."""
        for stale in (self._folder / "security").glob(f"ipcontroller-{_CLUSTER_ID}-*.json"):
            stale.unlink()  # a killed controller leaves its file
        self.cluster.start_controller_sync()
        process = psutil.Process(self.cluster.controller.pid)
        self._guard(process)
        try:
            self.client = self.cluster.connect_client_sync()
        except Exception as error:
            raise StartError(f"the controller did not respond: {error}") from error
        self._fleet.forward_controller(self.file("engine"))
        return f"pid {process.pid}"

    def take_over(self, pids: list[int], *, answers: bool) -> None:
        """Use the controller that another process has started.

        Args:
            pids: its processes that still run.
            answers: True if the controller itself runs; it is the first pid then.
        """
        missing = psutil.NoSuchProcess, OSError, ipyparallel.TimeoutError
        with contextlib.suppress(*missing):
            self._processes = [psutil.Process(pid) for pid in pids]
            if answers:
                self.client = ipyparallel.Client(str(self.file("client")), timeout=_CLIENT_S)

    def file(self, whose: str) -> Path:
        """Return the path of the connection file for `engine` or `client`."""
        return self._folder / "security" / f"ipcontroller-{_CLUSTER_ID}-{whose}.json"

    def guard_schedulers(self) -> None:
        """Let the fork server end the controller's schedulers: they outlive a killed controller."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._processes[0].children(recursive=True):
                if process not in self._processes:
                    self._guard(process)

    def _guard(self, process: psutil.Process) -> None:
        self._fleet.home.guard(process.pid)
        self._processes.append(process)

    def new_launcher(self, **own: Any) -> ForkServerEngineSetLauncher:
        """Create a launcher for engines that already run, and register it with ipyparallel."""
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
        """End the controller and its engines, even if some of them have died."""
        with contextlib.ExitStack() as steps:
            steps.callback(self._end_schedulers)
            steps.callback(self.cluster.stop_controller_sync)
            steps.callback(self.cluster.stop_engines_sync)
            steps.callback(self.close_client)

    def _end_schedulers(self) -> None:
        """Kill schedulers that remain if the controller and the fork server were killed."""
        for process in await_ends(self._processes, _SCHEDULERS_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await_ends(self._processes, _SCHEDULERS_S)
