"""Lifecycle of a cluster: start, takeover, restart, resize and end."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from typing import TYPE_CHECKING, Self

from msgspec import structs

from nbdist.cluster import tpu_slices
from nbdist.cluster.fleet import Fleet
from nbdist.cluster.forkserver.client import ForkServerProcess
from nbdist.cluster.forkserver.control_socket import DETACHED_RUNNER, KERNEL
from nbdist.cluster.handover import (
    HandoverFile,
    controllers_of,
    inherit,
    new_folder,
    new_handover,
    of_worker_group,
    take_up,
)
from nbdist.cluster.worker_group import WorkerGroup, new_fleet
from nbdist.errors import StartError
from nbdist.execution import live_run
from nbdist.execution.replay_journal import Journal
from nbdist.execution.resume import reopen, run_of
from nbdist.execution.runner import Runner
from nbdist.records import run_name
from nbdist.session.devices import look
from nbdist.telemetry.cluster_file import ClusterFile
from nbdist.telemetry.frontend_request import this_request
from nbdist.telemetry.output_logs import LOG_FOLDER, OutputLogs
from nbdist.utils.files import LateFiles
from nbdist.views import formatting
from nbdist.views.cluster.workers import StartView
from nbdist.views.run.cell_output import CellView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nbdist.execution.live_run import LiveRun
    from nbdist.records import (
        CellRequest,
        ClusterRequest,
        HandoverState,
        RunningCell,
        WorkerState,
    )
    from nbdist.settings import Settings
    from nbdist.views.cluster.devices import DevicesPicture


class ClusterLifecycle:
    """One cluster, owned by this process. `start` and `adopt` create it.

    Attributes:
        folder: the folder of the cluster.
        worker_group: the ranks.
        handover: the stored state for a successor of this process.
        journal: the earlier cells and pushed objects.
        runner: runs cells.
        logs: the output of the ranks.
        file: the state of the cluster for Jupyter's server.
        under_way: follows the cell that another process has sent; None without one.
        is_up: False during a resize, and after one that failed.
    """

    def __init__(
        self, folder: Path, worker_group: WorkerGroup, handover: HandoverState, settings: Settings
    ) -> None:
        request = handover.request
        self._files = LateFiles()
        self.folder = folder
        self.worker_group = worker_group
        self.handover = HandoverFile(folder, handover, self._files)
        self.journal = Journal(folder / "journal", self._files)
        self.runner = Runner(worker_group, self.journal, self.handover, settings)
        self.logs = OutputLogs(folder / LOG_FOLDER)
        worker_group.receiver.subscribers.add(self.logs.take)
        worker_group.receiver.on_idle = self.logs.flush
        self.file = ClusterFile(folder, request.frameworks, self._files)
        self.under_way: Callable[[], None] | None = None
        self.is_up = True
        self._ended = contextlib.ExitStack()

    @classmethod
    def start(cls, request: ClusterRequest, settings: Settings) -> Self:
        """Start a cluster, and show the progress.

        Raises:
            StartError: the start failed. nbdist has ended all processes of it.
        """
        phases = StartView(f"nbdist: starting {_description(request)}")
        with contextlib.ExitStack() as undo, phases:
            folder = new_folder()
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            fleet = new_fleet(request, folder, settings)
            undo.callback(fleet.close)
            worker_group = WorkerGroup(request, folder, settings, fleet)
            undo.callback(worker_group.close)
            worker_group.open()
            lifecycle = cls(
                folder, worker_group, new_handover(folder, request, worker_group), settings
            )
            undo.callback(lifecycle._close_files)
            worker_group.receiver.start()
            worker_group.start(phases)
            lifecycle._publish_workers(phases)
            lifecycle._ended = undo.pop_all()
        return lifecycle

    @classmethod
    def adopt(cls, folder: Path, settings: Settings, *, detached_runner: bool) -> Self:
        """Take over the cluster of another process; see `Cluster.adopt`."""
        with contextlib.ExitStack() as undo:
            home = ForkServerProcess.take_over(
                folder, DETACHED_RUNNER if detached_runner else KERNEL
            )
            undo.callback(home.leave)
            handover = inherit(folder, detached_runner=detached_runner)
            fleet = Fleet(home, handover.request, settings)
            undo.callback(fleet.leave)
            worker_group = WorkerGroup(handover.request, folder, settings, fleet)
            undo.callback(worker_group.close_sockets)
            take_up(handover, worker_group)
            worker_group.open(handover)
            lifecycle = cls(folder, worker_group, handover, settings)
            undo.callback(lifecycle._close_files)
            lifecycle._adopt_cell(handover, settings)
            worker_group.receiver.start()
            lifecycle._ended.callback(shutil.rmtree, folder, ignore_errors=True)
            lifecycle._ended.push(undo.pop_all())
        lifecycle._ended.callback(worker_group.close)
        lifecycle.file.write(lifecycle.workers(), run=handover.cell.run if handover.cell else "")
        return lifecycle

    def _adopt_cell(self, handover: HandoverState, settings: Settings) -> None:
        """Restore the last result, and prepare to follow the running cell if there is one."""
        self.runner.last_run = run_of(handover.last)
        if handover.cell is not None:
            resumed = reopen(handover.cell, settings)
            state = resumed.live.state
            self._name_cell(handover.cell, state.name if state is not None else "")
            hosts = {rank: self.worker_group.hellos[rank].host for rank in handover.cell.ranks}
            view = new_view(resumed.live, hosts, settings)
            self.under_way = self.runner.expect(handover.cell, resumed, view, hosts)

    def begin(self, cell: RunningCell, ran: tuple[str, ...]) -> None:
        """Store a cell before it is sent. `ran` contains the texts of all cells with this one."""
        self.file.begin(cell.run, cell.ranks)
        self._name_cell(cell)
        own = this_request().cell
        self.handover.begin(structs.replace(cell, notebook_cell=own), ran)

    def _name_cell(self, cell: RunningCell, name: str = "") -> None:
        request = cell.request
        name = name or request.options.name or run_name(request.label, "", time.time())
        self.logs.begin(request.number, name)

    def settle(self) -> None:
        """Store the end of the running cell."""
        cell = self.handover.handover.cell
        self.file.write(self.workers(), run="")
        self.handover.settle(**of_worker_group(self.worker_group))
        if cell is not None and cell.detached:
            with contextlib.suppress(StartError):  # the fork server died, and the workers with it
                self.worker_group.detach(on=False)

    def devices(self, *, bench: bool) -> DevicesPicture:
        """Return the devices; see `devices.look`. Store the measurements for a successor."""
        picture = look(self.worker_group, bench=bench)
        self.handover.update(**of_worker_group(self.worker_group))
        return picture

    def restart(self) -> None:
        """Replace every engine by a fresh one; see `Cluster.restart`."""
        count = len(self.handover.handover.request.hosts)
        phases = StartView(f"nbdist: restarting {count} workers")
        with contextlib.ExitStack() as undo, phases:
            undo.push(self._ended.pop_all())
            self.runner.forget()
            self.worker_group.restart(phases, range(count))
            self.journal.clear()
            self._publish_workers(phases)
            self._ended = undo.pop_all()

    def resize(self, request: ClusterRequest, run: CellRequest | None) -> None:
        """Start fresh workers on other hosts.

        Args:
            request: the new request.
            run: the run to continue, or None. nbdist creates its inputs again.

        Raises:
            ReplayError: an input of the run cannot be created again; nothing was changed.
            UsageError: a host cannot be reached; nothing was changed.
        """
        before, after = self.worker_group.world_size, len(request.hosts)
        if run is not None:
            self.runner.check_replayable(run)
        phases = StartView(f"nbdist: from {formatting.count(before, 'worker')} to {after}")
        with contextlib.ExitStack() as undo, phases:
            fleet = self.worker_group.engines.fleet
            if fleet.missing_hosts(request):
                bound_s = self.worker_group.engines.timeout_s
                require = functools.partial(fleet.require, request, bound_s, phases.show_message)
                phases.run("hosts reached", require)
            undo.push(self._ended.pop_all())
            self.is_up = False
            self.runner.forget()
            self.worker_group.resize(phases, request)
            self.journal.resized(before, self.worker_group.world_size)
            self.handover.update(request=request)
            if run is not None:
                self.runner.recreate_inputs(run, phases)
            self._publish_workers(
                phases, "" if run is not None else self.journal.describe_lost_names([])
            )
            self._ended, self.is_up = undo.pop_all(), True

    def _publish_workers(self, phases: StartView, gone: str = "") -> None:
        """Show and store the fresh workers. `gone` describes the names that they lack."""
        workers = self.workers(measure=False)
        ready = f"nbdist: {formatting.ready(len(workers))}"
        phases.finish(f"{ready}, {gone}" if gone else ready, workers)
        self.file.write(self.workers(), run="")
        self.handover.update(
            loss=None, **of_worker_group(self.worker_group), **controllers_of(self.worker_group)
        )

    def stop(self) -> None:
        """End every process. May be called more than once."""
        self.runner.forget()
        self._ended.close()

    def leave(self) -> None:
        """Release the cluster. It continues to run for another owner."""
        self._ended.pop_all()
        self._close_files()
        self.worker_group.leave()

    def _close_files(self) -> None:
        self.logs.close()
        self._files.close()

    def workers(self, *, measure: bool = True) -> tuple[WorkerState, ...]:
        """Return the current state of each rank; with `measure`, also the memory that it uses."""
        return self.worker_group.states(self.runner.busy(), measure=measure)


def _description(request: ClusterRequest) -> str:
    workers = formatting.count(len(request.hosts), "worker")
    hosts = formatting.count(len({host.key for host in request.hosts}), "host")
    tpu = f", {tpu_slices.describe(request.tpu)}" if request.tpu else ""
    return f"{workers} on {'this machine' if request.is_local else hosts}{tpu}"


def new_view(run: LiveRun, host_of: Mapping[int, str], settings: Settings) -> CellView:
    """Return the view of a cell.

    Args:
        run: the run. It stores the shown text.
        host_of: the host of each rank that runs the cell.
        settings: the limits and the kind of the view.
    """
    wait_s, limit = settings.fold_wait_s, settings.shown_output_characters
    return CellView(host_of, wait_s, limit, live_run.shown(run, settings), run.show)
