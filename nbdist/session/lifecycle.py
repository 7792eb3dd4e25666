"""What one process has of a cluster: its folder, its crew, and what runs cells on it."""

from __future__ import annotations

import contextlib
import functools
import shutil
from typing import TYPE_CHECKING, Self

from nbdist.cluster.fleet import Fleet
from nbdist.cluster.forkserver.client import SeedProcess
from nbdist.cluster.forkserver.control_socket import KEEPER, KERNEL
from nbdist.cluster.handover import EstateFile
from nbdist.cluster.takeover import (
    controllers_of,
    inherit,
    new_estate,
    new_folder,
    of_crew,
    take_up,
)
from nbdist.cluster.worker_group import Crew, new_fleet
from nbdist.errors import StartError
from nbdist.execution import live_run
from nbdist.execution.replay_journal import Journal
from nbdist.execution.resume import reopen, run_of
from nbdist.execution.runner import Runner
from nbdist.session.devices import look
from nbdist.telemetry.cluster_file import ClusterFile
from nbdist.telemetry.output_logs import OutputLogs
from nbdist.utils.files import LateFiles
from nbdist.views import formatting
from nbdist.views.cluster.start_progress import StartView
from nbdist.views.run.cell_output import CellView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nbdist.execution.live_run import LiveRun
    from nbdist.records import (
        CellRequest,
        CellUnderWay,
        ClusterRequest,
        Estate,
        Speech,
        WorkerState,
    )
    from nbdist.settings import Settings
    from nbdist.views.cluster.devices import DevicesPicture


class Holding:
    """One cluster, as its owner has it; made by `start` or `adopt`.

    Attributes:
        folder: the cluster's.
        crew: its ranks.
        estate: for whoever comes after this process.
        journal: what was done to the ranks.
        runner: runs cells.
        logs: what the ranks wrote.
        file: for whoever looks.
        under_way: follows the cell that another process had sent; None where there is none.
        is_up: there are workers, or have been since the last time that fresh ones were to come.
    """

    def __init__(self, folder: Path, crew: Crew, estate: Estate, settings: Settings) -> None:
        request = estate.request
        self._files = LateFiles()
        self.folder = folder
        self.crew = crew
        self.estate = EstateFile(folder, estate, self._files)
        self.journal = Journal(folder / "journal", self._files)
        self.runner = Runner(crew, self.journal, self.estate, settings)
        self.logs = OutputLogs(folder / "log")
        self.file = ClusterFile(folder, request.frameworks, self._files)
        self.under_way: Callable[[], None] | None = None
        self.is_up = True
        self._ended = contextlib.ExitStack()

    @classmethod
    def start(cls, request: ClusterRequest, settings: Settings) -> Self:
        """Start a cluster, and show how.

        Raises:
            StartError: it failed; whatever had been started is gone.
        """
        phases = StartView(f"nbdist: starting {_what(request)}")
        with contextlib.ExitStack() as undo, phases:
            folder = new_folder()
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            fleet = new_fleet(request, folder, settings)
            undo.callback(fleet.close)
            crew = Crew(request, folder, settings, fleet)
            undo.callback(crew.close)

            def hear(record: Speech) -> None:  # nobody speaks before there are engines
                held.hear(record)

            crew.open(hear)
            held = cls(folder, crew, new_estate(folder, request, crew), settings)
            undo.callback(held._close_files)
            crew.start(phases)
            held._come_up(phases)
            held._ended = undo.pop_all()
        return held

    @classmethod
    def adopt(cls, folder: Path, settings: Settings, *, keeper: bool) -> Self:
        """Take over what another process had; see `Cluster.adopt`."""
        with contextlib.ExitStack() as undo:
            home = SeedProcess.take_over(folder, KEEPER if keeper else KERNEL)
            undo.callback(home.leave)
            estate = inherit(folder, keeper=keeper)
            fleet = Fleet(home, estate.request, settings)
            undo.callback(fleet.leave)
            crew = Crew(estate.request, folder, settings, fleet)
            undo.callback(crew.close_sockets)
            take_up(estate, crew)
            held = cls(folder, crew, estate, settings)
            undo.callback(held._close_files)
            held._expect(estate, settings)
            crew.open(held.hear, estate)
            held._ended.callback(shutil.rmtree, folder, ignore_errors=True)
            held._ended.push(undo.pop_all())
        held._ended.callback(crew.close)
        held.file.write(held.workers(), run=estate.cell.run if estate.cell else "")
        return held

    def _expect(self, estate: Estate, settings: Settings) -> None:
        self.runner.last_run = run_of(estate.last)
        if estate.cell is not None:
            former = reopen(estate.cell, settings)
            hosts = {rank: self.crew.hellos[rank].host for rank in estate.cell.ranks}
            view = new_view(former.live, hosts, settings)
            self.under_way = self.runner.expect(estate.cell, former, view, hosts)

    def hear(self, record: Speech) -> None:
        """On the receiver's thread: keep the text, and tell whoever follows a cell."""
        self.runner.hear(record)
        self.logs.take(record)

    def begin(self, cell: CellUnderWay, ran: tuple[str, ...]) -> None:
        """A cell is about to be sent; `ran` are the texts of all, this one too."""
        self.file.begin(cell.run, cell.ranks)
        self.estate.begin(cell, ran)

    def settle(self) -> None:
        """There is no cell under way any more."""
        cell = self.estate.estate.cell
        self.file.write(self.workers(), run="")
        self.estate.settle(**of_crew(self.crew))
        if cell is not None and cell.detached:
            with contextlib.suppress(StartError):  # the seed is gone, and all with it
                self.crew.detach(on=False)

    def devices(self, *, bench: bool) -> DevicesPicture:
        """See `devices.look`; what is measured is known to whoever comes after this process."""
        picture = look(self.crew, bench=bench)
        self.estate.update(**of_crew(self.crew))
        return picture

    def restart(self) -> None:
        """Replace every engine by a fresh one, where `engines.can_restart()`."""
        count = len(self.estate.estate.request.hosts)
        phases = StartView(f"nbdist: restarting {count} workers")
        with contextlib.ExitStack() as undo, phases:
            undo.push(self._ended.pop_all())
            self.runner.forget()
            self.crew.restart(phases, range(count))
            self.journal.clear()
            self._come_up(phases)
            self._ended = undo.pop_all()

    def resize(self, request: ClusterRequest, run: CellRequest | None) -> None:
        """Have fresh workers on other hosts.

        Args:
            request: what is asked for now.
            run: goes on there: what it needs is done again.

        Raises:
            ReplayError: that cannot be done again; nothing was changed.
            UsageError: a host cannot be reached; likewise.
        """
        before, after = self.crew.world_size, len(request.hosts)
        if run is not None:
            self.runner.refuse_unmade(run)
        phases = StartView(f"nbdist: from {formatting.count(before, 'worker')} to {after}")
        with contextlib.ExitStack() as undo, phases:
            fleet = self.crew.engines.fleet
            if fleet.lacks(request):
                bound_s = self.crew.engines.timeout_s
                require = functools.partial(fleet.require, request, bound_s, phases.say)
                phases.run("hosts reached", require)
            undo.push(self._ended.pop_all())
            self.is_up = False
            self.runner.forget()
            self.crew.resize(phases, request)
            self.journal.resized(before, self.crew.world_size)
            self.estate.update(request=request)
            if run is not None:
                self.runner.make_again(run, phases)
            self._come_up(phases, "" if run is not None else self.journal.gone([]))
            self._ended, self.is_up = undo.pop_all(), True

    def _come_up(self, phases: StartView, gone: str = "") -> None:
        """Engines are new; `gone` says what they do not have."""
        workers = self.workers(measure=False)
        ready = f"nbdist: {formatting.ready(len(workers))}"
        phases.finish(f"{ready}, {gone}" if gone else ready, workers)
        self.file.write(self.workers(), run="")
        self.estate.update(loss=None, **of_crew(self.crew), **controllers_of(self.crew))

    def stop(self) -> None:
        """End every process. May be called more than once."""
        self.runner.forget()
        self._ended.close()

    def leave(self) -> None:
        """Let go of everything: it goes on for another owner."""
        self._ended.pop_all()
        self._close_files()
        self.crew.leave()

    def _close_files(self) -> None:
        self.logs.close()
        self._files.close()

    def workers(self, *, measure: bool = True) -> tuple[WorkerState, ...]:
        """Every rank, as it is now; with `measure`, also the memory that each takes."""
        return self.crew.states(self.runner.busy(), measure=measure)


def _what(request: ClusterRequest) -> str:
    workers = formatting.count(len(request.hosts), "worker")
    hosts = formatting.count(len({host.key for host in request.hosts}), "host")
    return f"{workers} on {'this machine' if request.is_local else hosts}"


def new_view(kept: LiveRun, host_of: Mapping[int, str], settings: Settings) -> CellView:
    """What shows a cell.

    Args:
        kept: keeps what is shown, and the run.
        host_of: the host of each rank that runs it.
        settings: how much is shown, and where.
    """
    wait_s, limit = settings.fold_wait_s, settings.shown_output_characters
    return CellView(host_of, wait_s, limit, live_run.shown(kept, settings), kept.show)
