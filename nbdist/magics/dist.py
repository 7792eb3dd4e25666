"""Magics for a cluster. They parse the line and call `session`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import cell_magic, line_magic, magics_class

from nbdist.errors import CellError, UsageError
from nbdist.execution.following import follow
from nbdist.magics.base import ClusterMagics, describe
from nbdist.magics.options import (
    OUTPUT,
    RANKS,
    RUNNING,
    check_name,
    command,
    options_from,
    parse,
)
from nbdist.magics.start_options import (
    EXAMINING,
    RESIZING,
    STARTING,
    examination,
    examined,
    names_hosts,
    resized,
    started,
)
from nbdist.records import Option
from nbdist.session.discovery import attach, stop_all
from nbdist.settings import Settings
from nbdist.views import formatting
from nbdist.views.surface import show_once

if TYPE_CHECKING:
    from nbdist.session.cluster import Cluster
    from nbdist.views.cluster.hosts import DoctorPicture, HostsPicture
    from nbdist.views.cluster.workers import StatusPicture
    from nbdist.views.placement.picture import PlacementPicture


@magics_class
class DistMagics(ClusterMagics):
    """The `%dist_...` magics of a notebook with one cluster."""

    shell: Any

    @command(*STARTING)
    @line_magic
    def dist_start(self, line: str) -> None:
        """Start one worker on each host, and wait until all respond.

        `4 hosts` starts four workers on this machine. `gpu1 gpu2:8 me@gpu3:2222` starts one worker
        on each of three hosts over ssh: with 8 devices on the second, through port 2222 on the
        third. On a TPU VM, `tpu` starts one worker on each host of its slice.
        """
        args = parse(self.dist_start, line)
        self._refuse_running()
        self._brought = {}
        self._started = started(args)

    @command(*RUNNING, OUTPUT)
    @cell_magic
    def dist_run(self, line: str, cell: str) -> None:
        """Run the cell once on every worker, or once for each batch, in the strategy's scope.

        The cell can use `rank`, `world_size`, `strategy`, `mesh` (JAX) and `report(epoch=1,
        loss=0.5)`. With `--data`, it is the body of a training step: `batch` is the batch, and the
        last expression, or `loss`, is reported.
        """
        args = parse(self.dist_run, line)
        cluster = self.running_cluster("%%dist_run")
        check_name(args.output)
        options = options_from(args)
        if options.step is not None and options.step.data:
            self.move_data(cluster, options.step.data)
        before = cluster.last_run
        try:
            cluster.run(cell, options, label=self.cell_number(), header=f"%%dist_run {line}")
        except CellError as error:
            hint = self.push_hint(error)
            if not hint:
                raise
            raise error.with_note(hint) from None
        finally:  # a failed run is stored too, with its reports
            if args.output and cluster.last_run is not before:
                self.shell.user_ns[args.output] = cluster.last_run

    @command()
    @line_magic
    def dist_status(self, line: str) -> StatusPicture:
        """Show host, process, devices, memory and state of every worker, and the seed."""
        parse(self.dist_status, line)
        return self.shown(self.running_cluster("%dist_status").status())

    @command(
        Option(flags=("cluster",), nargs="?", default="the only one", help="Id of the cluster."),
        Option(
            flags=("--run",),
            metavar="FOLDER",
            help="Folder of a run, or of runs, of a job: follow it instead.",
        ),
        OUTPUT,
    )
    @line_magic
    def dist_attach(self, line: str) -> None:
        """Take over the workers of a notebook whose kernel has ended, and follow their cell.

        With `--run`, show the run of a job until it ends. An interrupt ends the view, not the job.
        """
        args = parse(self.dist_attach, line)
        check_name(args.output)
        if args.run:
            if args.cluster:
                raise UsageError("--run follows a job, not a cluster: leave out the id")
            run = follow(Path(args.run), Settings.from_environment())
            if args.output:
                self.shell.user_ns[args.output] = run
            return
        self._refuse_running()
        self._brought = {}
        self._started = cluster = attach(args.cluster or "")
        show_once(cluster.status())
        try:
            cluster.follow()
        finally:
            if args.output:
                self.shell.user_ns[args.output] = cluster.last_run

    @command()
    @line_magic
    def dist_hosts(self, line: str) -> HostsPicture:
        """Show the address, devices, Python, folder and connection of each worker's host."""
        parse(self.dist_hosts, line)
        return self.shown(self.running_cluster("%dist_hosts").hosts())

    @command(*EXAMINING)
    @line_magic
    def dist_doctor(self, line: str) -> DoctorPicture:
        """Check hosts, and the network between them, for problems that would stop a run.

        Without hosts, nbdist checks those of the running workers.
        """
        args = parse(self.dist_doctor, line)
        if names_hosts(args):
            return self.shown(examined(args, self.imported()))
        cluster = self.running_cluster("%dist_doctor")
        return self.shown(cluster.examine(**examination(args), modules=self.imported()))

    @command(
        Option(flags=("--all",), kind="switch", help="Also end clusters of earlier notebooks.")
    )
    @line_magic
    def dist_stop(self, line: str) -> None:
        """End every worker."""
        args = parse(self.dist_stop, line)
        if self.has_cluster() or not args.all:
            cluster = self.running_cluster("%dist_stop")
            hosts = len({worker.host for worker in cluster.workers(measure=False)})
            cluster.stop()
            self._started = None
            _report(
                f"ended {formatting.count(cluster.world_size, 'worker')} "
                f"on {formatting.count(hosts, 'host')}"
            )
        for message in stop_all() if args.all else ():
            _report(message)

    @command()
    @line_magic
    def dist_restart(self, line: str) -> None:
        """Replace every worker by a new one, also a worker that does not respond."""
        parse(self.dist_restart, line)
        self.running_cluster("%dist_restart").restart()

    @command(*RESIZING)
    @line_magic
    def dist_resize(self, line: str) -> None:
        """Start new workers on other hosts, or on more or fewer hosts, between cells.

        Names that cells have defined are lost.
        """
        args = parse(self.dist_resize, line)
        self.running_cluster("%dist_resize").resize(resized(args), go_on=args.go_on)

    @command(Option(flags=("rank",), nargs="?", kind="number", default="0", help="The rank."))
    @line_magic
    def dist_logs(self, line: str) -> None:
        """Show the whole output of a worker."""
        args = parse(self.dist_logs, line)
        sys.stdout.write(self.running_cluster("%dist_logs").logs(args.rank or 0))

    @command(
        Option(flags=("names",), nargs="+", help="Names in the notebook."),
        RANKS.but(help="Ranks to copy to, as in 0,2:4.", details=""),
    )
    @line_magic
    def dist_push(self, line: str) -> None:
        """Copy objects of the notebook to the workers, under the same names."""
        args = parse(self.dist_push, line)
        cluster = self.running_cluster("%dist_push")
        missing = [name for name in args.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"no such name in the notebook: {', '.join(missing)}; define it first")
        objects = {name: self.shell.user_ns[name] for name in args.names}
        size = cluster.push(objects, ranks=args.ranks)
        self._copied |= {name: id(value) for name, value in objects.items()}
        copied = formatting.names(args.names)
        _report(
            f"copied {copied} to {_ranks_of(cluster, args.ranks)} ({formatting.size(size)} each)"
        )

    @command(
        Option(flags=("names",), nargs="+", help="Names on the workers."),
        RANKS.but(flags=("-r", *RANKS.flags), help="Ranks to copy from, as in 0,2:4.", details=""),
        OUTPUT.but(default="the name on the workers", help="Name in the notebook."),
        Option(
            flags=("--replace",),
            kind="switch",
            help="Replace a variable of the notebook.",
            details="A copy from an earlier %dist_push or %dist_pull is always replaced.",
        ),
    )
    @line_magic
    def dist_pull(self, line: str) -> None:
        """Copy objects of the workers to the notebook.

        One rank gives the object itself, several ranks a list in rank order. Arrays arrive as
        NumPy arrays. A variable of the notebook is not replaced without `--replace`.
        """
        args = parse(self.dist_pull, line)
        check_name(args.output)
        if args.output and len(args.names) > 1:
            raise UsageError(
                f"-o {args.output} is one name for {len(args.names)} objects: pull them one by one"
            )
        cluster = self.running_cluster("%dist_pull")
        here = self.shell.user_ns
        targets = [args.output] if args.output else args.names
        replaced = ", ".join(
            f"`{name}` ({describe(here[name])})" for name in targets if name in here
        )
        own = [
            name for name in targets if name in here and self._copied.get(name) != id(here[name])
        ]
        if own and not args.replace:
            raise UsageError(
                f"the notebook has another {formatting.names(own)}: choose a name with -o NAME, or "
                f"run %dist_pull {' '.join(args.names)} --replace"
            )
        pulled = cluster.pull(args.names, ranks=args.ranks)
        for name, target in zip(args.names, targets, strict=True):
            values = [objects[name] for objects in pulled.values()]
            here[target] = values[0] if len(values) == 1 else values
            self._copied[target] = id(here[target])
        as_name = f" as `{args.output}`" if args.output else ""
        lost = f"; replaced {replaced} of the notebook" if replaced else ""
        source = _ranks_of(cluster, args.ranks)
        _report(f"copied {formatting.names(args.names)} from {source}{as_name}{lost}")

    @command(
        Option(
            flags=("names",),
            nargs="+",
            help="Names on the workers, such as params or model.optimizer.",
        )
    )
    @line_magic
    def dist_show(self, line: str) -> PlacementPicture:
        """Show where arrays are: their shards, the device of each shard, and its bytes."""
        args = parse(self.dist_show, line)
        return self.shown(self.running_cluster("%dist_show").show(*args.names))

    @command(Option(flags=("run",), nargs="?", default="all runs", help="Id of a run."))
    @line_magic
    def dist_tensorboard(self, line: str) -> None:
        """Open TensorBoard on stored runs, also on those in progress."""
        show_once(self.boards.open(parse(self.dist_tensorboard, line).run))

    def end(self) -> None:
        """End the cluster with the notebook."""
        self.boards.close()
        if self._started is not None:
            self._started.stop()
            self._started = None


def _report(text: str) -> None:
    """Show the result of a magic in one line."""
    sys.stdout.write(f"nbdist: {text}\n")


def _ranks_of(cluster: Cluster, given: str | None) -> str:
    """Describe ranks: `4 workers`, `rank 0`, `ranks 0-1`."""
    ranks = cluster.inspection.chosen(given)
    if len(ranks) == cluster.world_size:
        return formatting.count(len(ranks), "worker")
    return f"rank{'s' * (len(ranks) > 1)} {formatting.ranks(ranks)}"
