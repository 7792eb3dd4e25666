"""Python API: `Cluster` and `Run`. This module connects all other packages."""

from __future__ import annotations

import contextlib
import secrets
import sys
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from nbdist.cells.options import cell_options
from nbdist.cells.parse import choose_strategy, parse_cell
from nbdist.cluster import host_request
from nbdist.cluster import resources as host_rules
from nbdist.cluster.preflight import require_shared
from nbdist.errors import ClosedError, LeftError, UsageError
from nbdist.execution import live_run, pushing
from nbdist.execution.result import Run
from nbdist.records import ClusterRequest, Communication, RunningCell, Sync
from nbdist.session.exporting import Exported, export
from nbdist.session.inspection import ClusterInspection
from nbdist.session.lifecycle import ClusterLifecycle, new_view
from nbdist.session.pulling import pull
from nbdist.session.submission import SubmittedJob, submit
from nbdist.session.tracing import trace_on
from nbdist.session.transfer import write_objects
from nbdist.settings import Settings
from nbdist.utils.signals import interrupt_held
from nbdist.views.cluster.workers import StartView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.execution.live_run import LiveRun
    from nbdist.records import (
        Batch,
        CellOptions,
        CellRequest,
        Host,
        ProgramLaunch,
        StepOptions,
        Trace,
        WorkerState,
    )
    from nbdist.views.cluster.devices import DevicesPicture
    from nbdist.views.cluster.hosts import DoctorPicture, HostsPicture
    from nbdist.views.cluster.workers import StatusPicture
    from nbdist.views.placement.picture import PlacementPicture

__all__ = ["Cluster", "Run"]


class Cluster:
    """Workers on one or more hosts, ready to run cells.

    One engine runs on each host. Engines of one cluster share the collectives of its frameworks.

    Args:
        hosts: Number of hosts, on this machine or from a scheduler (`batch`). Or a list of hosts
            for `ssh`: `"gpu1"`, `"gpu2:8"` (8 devices), `"me@gpu3:2222"` (a port), `nbdist.Host`.
            Or `"tpu"`: the hosts of this machine's TPU slice.
        batch: Request for a scheduler, such as Slurm or Kubernetes.
        framework: `tensorflow`, `jax` or `both`. Default: all that are installed.
        devices_per_host: Visible GPUs of each engine, or virtual CPU devices (JAX) without GPUs.
            Default: all GPUs of the host, else one CPU device.
        cpus_per_worker: Cores that each engine is bound to. Default: no limit.
        env: Environment variables of the engines.
        communication: TensorFlow's collectives: `ring`, `nccl`, `auto` (NCCL on GPUs, else ring).
        spares: Waiting engines that replace lost ones under `pjrt`. Default: none.
        min_hosts: Start with as few hosts as this if others cannot be reached. Default: all hosts.
        install: Install this Python's packages on hosts over `ssh`, apart from existing ones.
        sync: Send your own modules that cells import, and their edits. `nbdist.Sync` names further
            folders and files to leave out. False to import them from the hosts' own disks.
        seed: Seed of Python, NumPy, TensorFlow and Keras, from 0 to 2**32 - 1. Default: random.
        settings: Limits and folders. Default: environment variables.

    Attributes:
        running: True if cells can run. False after `stop`, or a restart that failed.
        last_run: `Run` of the newest cell, also if the cell failed.

    Raises:
        UsageError: The request is invalid; nothing started.
        StartError: The start failed; nbdist ended all processes of it.

    Examples:
        >>> with nbdist.Cluster(hosts=2, framework="jax") as cluster:  # doctest: +SKIP
        ...     run = cluster.run("for step in range(3): report(loss=1 / (1 + step))")
        ...     print(run.loss, cluster.status().to_dataframe())
    """

    def __init__(
        self,
        hosts: int | Sequence[str | Host],
        *,
        batch: Batch | None = None,
        framework: str | None = None,
        devices_per_host: int = 0,
        cpus_per_worker: int = 0,
        env: Mapping[str, str] | None = None,
        communication: Communication = "auto",
        spares: int = 0,
        min_hosts: int = 0,
        install: bool = False,
        sync: bool | Sync = True,
        seed: int | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings.from_environment()
        chosen = host_request.chosen(hosts, batch)
        self.request = ClusterRequest(
            hosts=chosen,
            frameworks=host_rules.choose_frameworks(framework, chosen, here=install),
            devices_per_host=devices_per_host,
            cpus_per_worker=cpus_per_worker,
            env=dict(env or {}),
            communication=communication,
            spares=spares,
            min_hosts=min_hosts,
            install=install,
            batch=batch,
            sync=(Sync() if sync else None) if isinstance(sync, bool) else sync,
            seed=secrets.randbelow(2**31) if seed is None else seed,
        )
        host_rules.check(self.request, self.settings.worker_memory_bytes)
        self._ran: list[str] = []
        self.running = False
        self._attach(ClusterLifecycle.start(self.request, self.settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        workers = f"{self.world_size} workers: {', '.join(self.request.frameworks)}"
        return f"<nbdist.Cluster of {workers}>"

    # Starting and stopping.

    def _attach(self, lifecycle: ClusterLifecycle) -> None:
        self._lifecycle, self._folder = lifecycle, lifecycle.folder
        self._worker_group, self._runner = lifecycle.worker_group, lifecycle.runner
        self._journal = lifecycle.journal
        self.inspection = ClusterInspection(lifecycle)
        self._runner.evaluate = self.run
        self.running = True

    def restart(self) -> None:
        """Replace every engine by a fresh one. Names that cells have defined are lost.

        It also replaces engines that do not respond, and restores dead processes of the cluster.

        Raises:
            StartError: The restart failed; nbdist ended the cluster.
        """
        self.running = False
        self._lifecycle.restart()
        self.running = True

    def resize(self, hosts: int | Sequence[str | Host], *, go_on: bool = False) -> Run | None:
        """Start fresh workers on other hosts, or on more or fewer hosts.

        Names that cells have defined are lost.

        Args:
            hosts: Names or a number, like those of `Cluster`. A smaller number selects the
                first of named hosts.
            go_on: Continue the stopped run from its newest checkpoint, with the same global batch.
                nbdist creates its inputs again.

        Returns:
            The continued run; None without `go_on`.

        Raises:
            UsageError, ReplayError: The request is not possible; nothing was changed.
            StartError: The start failed; nbdist ended the cluster.
            CellError, WorkerError, KeyboardInterrupt: With `go_on`; see `run`.
        """
        last = self._journal.last_saved() if go_on else None
        if go_on and last is None:
            raise UsageError("no run had --checkpoint: run a cell with --checkpoint first")
        request = host_request.resized(self.request, hosts)
        host_rules.check(request, self.settings.worker_memory_bytes)
        self.running = False
        try:
            self._lifecycle.resize(request, last)
            self.request = request
        finally:
            self.running = self._lifecycle.is_up
        return self._go_on(last) if last is not None else None

    def _go_on(self, run: CellRequest) -> Run:
        """Run a cell again from its newest checkpoint. Its inputs exist on the workers."""
        assert run.saving is not None
        require_shared(self._worker_group.engines, run.saving.folder)
        request = run.with_options(saving=structs.replace(run.saving, resume=True))
        request = structs.replace(request, number=self._runner.number + 1)
        headers = (text.partition("\n")[0].partition(f"[{run.label}] ")[2] for text in self._ran)
        under_way = RunningCell(request=request, ranks=self.inspection.chosen(None))
        return self._keep(under_way, next(filter(None, headers), ""))

    def stop(self) -> None:
        """End every process of the cluster. May be called more than once."""
        self.running = False
        self._lifecycle.stop()

    # Views.

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.inspection.world_size

    def show(self, *names: str) -> PlacementPicture:
        """Show the placement of arrays on the workers.

        Args:
            *names: Names of the workers' namespaces, such as `params` or `model.optimizer`.

        Returns:
            A sequence of one row for each array.

        Raises:
            UsageError: A name is invalid, or contains no array on any rank.
            TransferError: A name exists on no rank.
            WorkerError: A rank has died, or still runs a cell.
        """
        return self.inspection.show(names)

    def workers(self, *, measure: bool = True) -> tuple[WorkerState, ...]:
        """Return the current state of each rank, also of ranks that have died.

        Args:
            measure: Also measure the memory of each rank.

        Returns:
            One state for each rank, in the order of the ranks. `state` is `idle`, `busy` or `dead`.
            `memory_bytes` is 0 without `measure`, for dead ranks, and for ranks on hosts that do
            not respond.
        """
        return self._lifecycle.workers(measure=measure)

    def status(self) -> StatusPicture:
        """Return the state of each rank, also of ranks that have died.

        Returns:
            A sequence of one row for each rank, in the order of the ranks.
        """
        return self.inspection.status()

    def devices(self, *, bench: bool = False) -> DevicesPicture:
        """Return the devices of all ranks: memory in bytes, bandwidths in bytes/s.

        Args:
            bench: Measure them first. Later plans of steps use the measurements.

        Returns:
            A sequence of one row for each device.

        Raises:
            UsageError: `bench` needs JAX, and the workers do not run it.
            WorkerError: A rank has died, or still runs a cell.
        """
        return self.inspection.devices(bench=bench)

    def trace(
        self,
        cell: str,
        *,
        ranks: str | None = None,
        strategy: str | None = None,
        step: StepOptions | None = None,
        keep: str = "",
    ) -> Trace:
        """Run a cell under JAX's profiler, and divide its time by operation, device and line.

        Args:
            cell: The code.
            ranks: Ranks and slices such as `0,2:4` (0, 2 and 3). Default: all.
            strategy: `pjrt` or None; `mirrored` is refused.
            step: Options that make the cell a training step. Without a number of steps, nbdist
                traces 20 steps.
            keep: Folder on this machine for the profiler's files; empty to discard them.

        Returns:
            The times, merged over the ranks.

        Raises:
            UsageError: The strategy is another one, the workers do not run JAX, another trace is in
                progress, or the cell or an option is invalid; nothing ran.
            CellError, WorkerError, KeyboardInterrupt: See `run`.
        """
        options = cell_options({"ranks": ranks, "strategy": strategy, "step": step})
        return trace_on(self, cell, options, keep=keep)

    def logs(self, rank: int) -> str:
        """Return the output of a rank's cells, each below a heading with the cell's name.

        Args:
            rank: Rank from 0 to `world_size - 1`.

        Returns:
            The text. The end of its engine's log follows a heading.

        Raises:
            UsageError: The cluster has no such rank.
        """
        return self.inspection.logs(rank)

    def hosts(self) -> HostsPicture:
        """Return the host of each rank: address, devices, Python, folder and connection.

        Returns:
            A sequence of one row for each rank, in the order of the ranks.

        Raises:
            WorkerError: A rank has died, or still runs a cell.
        """
        return self.inspection.hosts()

    def examine(
        self,
        *,
        data: str = "",
        checkpoint: str = "",
        modules: Collection[str] = (),
        bench: bool = False,
    ) -> DoctorPicture:
        """Examine the hosts and the network between them.

        Args:
            data: Glob pattern of files that should be equal on all hosts.
            checkpoint: Folder that all hosts should share.
            modules: Modules that should have the notebook's versions.
            bench: True to measure the bandwidth between each two hosts.

        Returns:
            A sequence of the problems found, each with a remedy.

        Raises:
            WorkerError: A rank has died, or still runs a cell.
        """
        return self.inspection.examine(data, checkpoint, modules, bench=bench)

    # Ownership.

    @classmethod
    def adopt(cls, folder: Path, settings: Settings, *, detached_runner: bool = False) -> Self:
        """Take over a running cluster whose owner has ended. `nbdist.attach` finds its folder.

        Args:
            folder: The folder of the cluster.
            settings: The settings of this process.
            detached_runner: True if this process is not a notebook's kernel. It hands the cluster
                over to a notebook that requests it.

        Returns:
            The cluster.

        Raises:
            OwnedError: A notebook's kernel owns the cluster.
            StartError: The cluster has ended, or cannot be reached.
        """
        self = cls.__new__(cls)
        self.settings = settings
        self._attach(ClusterLifecycle.adopt(folder, settings, detached_runner=detached_runner))
        handover = self._lifecycle.handover.handover
        self.request, self._ran = handover.request, list(handover.ran)
        return self

    def follow(self) -> Run:
        """Follow the cell that was running when this process took over the cluster, to its end.

        Returns:
            The result of the last cell.

        Raises:
            CellError, WorkerError, KeyboardInterrupt: See `run`.
            LeftError: Another process has taken over the cluster and follows the cell.
        """
        under_way, self._lifecycle.under_way = self._lifecycle.under_way, None
        if under_way is not None:
            with self._attended():
                under_way()
        return self.last_run

    def leave(self) -> None:
        """Release the cluster. It continues to run for another owner."""
        self.running = False
        self._lifecycle.leave()

    # Cells.

    def run(
        self,
        cell: str,
        options: CellOptions | None = None,
        *,
        label: int = 0,
        header: str = "",
        **given: Any,
    ) -> Run:
        """Run a cell once on every rank, and show its output while it runs.

        With `data`, the cell is the body of a training step and runs once for each batch. `batch`
        is the batch. The cell reports its last expression. If the cell assigns `loss`, and its last
        statement is not an expression or is a call other than `dict(...)`, it reports `loss`.

        Args:
            cell: The code.
            options: The options of the cell.
            label: The notebook's execution count, for tracebacks.
            header: The line above the cell in the notebook; empty without one.
            **given: Options by name, in place of `options`: those of `%%dist_run`, with `_` for `-`
                (docs/commands.md), as in `data="train", batch=64`.

        Returns:
            The result: reports, metrics and outputs of all ranks.

        Raises:
            UsageError: The cell is not valid Python, or the options are wrong or have other names;
                nothing ran.
            TypeError: Options are given by name and as `options`.
            WorkerError: A rank died, hangs, or still runs another cell.
            CellError: The cell raised an exception.
            KeyboardInterrupt: The kernel was interrupted. nbdist has interrupted the ranks.
        """
        if options is not None and given:
            raise TypeError(f"{', '.join(given)} with `options`: set them in `options` instead")
        options = options or cell_options(given)
        chosen = self.inspection.chosen(options.ranks)
        step, saving = options.step, options.saving
        if step is not None and len(chosen) < self.world_size:
            planned = "--data" if step.data else "a plan"
            raise UsageError(
                f"--ranks {options.ranks} with {planned}: it needs all ranks; remove one of them"
            )
        named = options.strategy
        scope = choose_strategy(named, self.request) if self.request.frameworks or named else None
        request = parse_cell(
            cell,
            options,
            number=self._runner.number + 1,
            label=label or self._runner.number + 1,
            strategy=scope if len(chosen) == self.world_size else None,
            header=header,
        )
        self._runner.modules.find(request.source)
        self._runner.settle()
        needs_recovery = self._runner.unavailable() or self._runner.is_recovery_interrupted
        if saving is None or not options.max_heals or not needs_recovery:
            self._runner.refuse_unready(chosen)
            self._reconnect()
            if saving is not None:
                require_shared(self._worker_group.engines, saving.folder)
        self._ran.append(f"# %% [{request.label}] {header}\n{cell}")
        return self._keep(RunningCell(request=request, ranks=chosen), header)

    def _keep(self, cell: RunningCell, header: str) -> Run:
        """Run the cell, and store its run."""
        workers = [w for w in self.workers(measure=False) if w.rank in cell.ranks]
        cells, seed = self._ran, self.request.seed
        with live_run.begun(cell.request, header, cells, workers, self.settings, seed) as run:
            runs = str(self.settings.runs_path)
            sent = structs.replace(cell, run=run.id, runs=runs, saved=())
            self._follow(sent, run, {worker.rank: worker.host for worker in workers})
        return self.last_run

    def _follow(self, cell: RunningCell, run: LiveRun, host_of: Mapping[int, str]) -> None:
        """Run the cell on ranks, and show and store their records."""
        view = new_view(run, host_of, self.settings)
        self._lifecycle.begin(cell, tuple(self._ran))
        with self._attended():
            self._runner.run(cell, view, run, host_of)

    @contextlib.contextmanager
    def _attended(self) -> Iterator[None]:
        """Update the state of the cluster after a cell that is followed in this context."""
        failed = True
        try:
            yield
            failed = False
        except LeftError:
            self.leave()
            raise
        finally:
            if self.running:
                with interrupt_held():
                    self._lifecycle.settle()
                    self._runner.add_to_journal(self._lifecycle.handover.handover.last, failed)
            if self._runner.stuck:
                self.restart()
        self._worker_group.warm_spares(self._runner.modules.others(self._journal.imports()))

    @property
    def last_run(self) -> Run:
        """The result of the last cell, also if it failed."""
        return self._runner.last_run

    def _reconnect(self) -> None:
        """Restore cancelled collectives and their state. Restart the workers if that fails."""
        collectives = self._worker_group.collectives
        if not collectives.broken:
            return
        try:
            with StartView("nbdist: a collective was cancelled") as phases:
                messages = collectives.rebuild(phases, collectives.strategies, self._journal.places)
                phases.finish("; ".join(("nbdist: collectives restored", *messages)), ())
        except ClosedError as error:
            sys.stderr.write(f"nbdist: {error}\n")
            self.restart()

    def export(
        self, folder: str, *, cell: int = 0, run: str = "", launch: ProgramLaunch | None = None
    ) -> Exported:
        """Write a training as a program that runs without notebook and engines.

        Args:
            folder: New folder for the program.
            cell: Execution count of the cell that trained. Default: the newest.
            run: Id of its run. Default: any.
            launch: `local`, `ssh` or a `nbdist.Batch`: also write its files. Default: none.

        Returns:
            The folder and the cell, and reasons why numbers may differ from the notebook's.

        Raises:
            UsageError: No such cell has trained, a cell cannot run in a program or was deleted, or
                the folder cannot be written. The message contains the remedies.
        """
        cells = self._journal, self._runner.modules
        return export(folder, self.request, *cells, cell=cell, run=run, launch=launch)

    def submit(
        self, folder: str, *, arguments: Sequence[str] = (), **training: Any
    ) -> SubmittedJob:
        """Export a training as `export` does, and start it as a job.

        Args:
            folder: New folder for the program. All hosts need it.
            arguments: Arguments of the program, such as `["--epochs", "10"]`.
            **training: `cell`, `run` and `launch` of `export`. Default of `launch`: `local`.

        Returns:
            The job. `nbdist.job(folder)` returns it again.

        Raises:
            UsageError: See `export`; or the launcher is not installed.
            StartError: The scheduler refuses the job. The folder is removed.
        """
        cells = self._journal, self._runner.modules
        return submit(folder, self.request, *cells, arguments=arguments, **training)

    # Objects.

    def push(self, objects: Mapping[str, object], ranks: str | None = None) -> int:
        """Copy objects to ranks, and bind them there under their names.

        Args:
            objects: The objects by name.
            ranks: Ranks and slices such as `0,2:4` (0, 2 and 3). Default: all.

        Returns:
            The number of bytes sent to each rank.

        Raises:
            UsageError: `ranks` is invalid, or a rank does not exist; nothing was sent.
            TransferError: An object cannot be pickled, or the copy to a rank failed.
            WorkerError: A rank has died, or still runs a cell; nothing was sent.
        """
        chosen = self.inspection.chosen(ranks)
        with self._journal.new_spool() as spool:
            self._runner.send_modules(write_objects(objects, spool), chosen)
            pushing.push(self._worker_group.engines, self._journal, objects, spool, chosen)
        return spool.size

    def pull(self, names: Sequence[str], ranks: str | None = None) -> dict[int, dict[str, Any]]:
        """Return objects by rank and name. Arrays of TensorFlow and JAX arrive as NumPy arrays.

        Of arrays of JAX that are sharded over ranks, each rank sends its own shards. All ranks then
        have the same array in the result.

        Args:
            names: Names of the workers' namespaces, without dots.
            ranks: Ranks and slices such as `0,2:4` (0, 2 and 3). Default: all.

        Returns:
            A dict of rank to a dict of name to object.

        Raises:
            UsageError: `ranks` is invalid, or a rank does not exist.
            TransferError: A name does not exist on a rank, an object cannot be pickled there or
                read here, or the copy failed. The ranks have different arrays of JAX that are
                sharded over them.
            WorkerError: A rank has died, or still runs a cell.
        """
        return pull(self.inspection.engines, names, self.inspection.chosen(ranks))
