"""What the user types: parsed here, done by `session`."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.magic import cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from nbdist.cells.parse import STRATEGIES, parse_saving, parse_seconds
from nbdist.errors import UsageError
from nbdist.magics.base import ClusterMagics
from nbdist.magics.options import check_name, planning_arguments, step_options
from nbdist.magics.start_options import (
    examined,
    examining_arguments,
    names_hosts,
    resized,
    resizing_arguments,
    started,
    starting_arguments,
)
from nbdist.records import GUARD_STEPS
from nbdist.session.cluster import MAX_RECOVERIES
from nbdist.session.discovery import attach, stop_all
from nbdist.views.surface import show_once


@magics_class
class DistMagics(ClusterMagics):
    """The `%dist_...` magics; one cluster for each notebook."""

    shell: Any

    @magic_arguments()
    @starting_arguments
    @line_magic
    def dist_start(self, line: str) -> None:
        """Start workers, one for each host, and wait until every one has answered.

        `4 hosts` are four workers on this machine; `gpu1 gpu2:8 me@gpu3:2222` are hosts that `ssh`
        reaches, of which the second one gives 8 devices, and the third one listens on port 2222.
        """
        args = parse_argstring(self.dist_start, line)
        self._refuse_running()
        self._brought = {}
        self._started = started(args)

    @magic_arguments()
    @argument("-t", "--ranks", help="Ranks to run on, as in 0,2:4, for cells without collectives.")
    @argument("--strategy", choices=STRATEGIES, help="The strategy whose scope the cell runs in.")
    @argument("-o", "--output", metavar="NAME", help="Keep the run under this name.")
    @argument(
        "--data",
        metavar="NAME",
        help="The cell is the body of a training step, run once for each batch of this data set: "
        "arrays, a tf.data.Dataset, an iterable or a function that makes one.",
    )
    @argument("--batch", type=int, metavar="N", help="Samples in a global batch.")
    @argument("--epochs", type=int, metavar="N", help="Passes through the data.")
    @argument("--steps", type=int, metavar="N", help="End after so many steps.")
    @argument("--shuffle", type=int, metavar="SEED", help="Shuffle arrays, the same on all ranks.")
    @argument(
        "--seed", type=int, metavar="N", help="Seed all generators, the same on all workers, first."
    )
    @argument(
        "--own-data",
        action="store_true",
        help="Each rank's data are its part of the data: fit and evaluate do not divide batches.",
    )
    @argument("--bucket", metavar="L,L", help="Pad sequences to these lengths; the step has mask.")
    @argument("--scale-lr", action="store_true", help="Learning rate times replicas, warmed up.")
    @argument("--check", action="store_true", help="First compare a step with one replica's.")
    @argument("--jit", action="store_true", help="Compile the step as a whole with XLA.")
    @argument("--on-nan", choices=("stop", "warn"), help="When a value is not finite; or stop.")
    @argument(
        "--hang-after",
        metavar="S",
        help="Steps that stand still for S seconds are broken off; left out, for ten times as long "
        "as a step takes, and half a minute at least.",
    )
    @argument(
        "--guard",
        type=int,
        default=GUARD_STEPS,
        metavar="N",
        help="Compare what workers should have alike after the first step and every N, and at the "
        "end of plain cells; 200 if left out, and 0 for never.",
    )
    @argument("--checkpoint", metavar="DIR", help="Save the state of the run in this folder.")
    @argument("--save-every", metavar="N", help="Steps, or seconds as in 30s, between two.")
    @argument("--keep", type=int, metavar="N", help="Checkpoints that are kept; 3 if left out.")
    @argument(
        "--max-heals",
        type=int,
        default=MAX_RECOVERIES,
        metavar="N",
        help="How often, in an hour, a run with --checkpoint goes on after it has lost workers.",
    )
    @argument(
        "--shrink",
        action="store_true",
        help="Go on with fewer workers, and the same batch, where lost ones cannot be started.",
    )
    @argument(
        "--once", action="store_true", help="Never run this cell again to recover a later run."
    )
    @argument("--resume", action="store_true", help="Go on from the newest checkpoint.")
    @argument(
        "--prefetch",
        metavar="N",
        help="Make batches ahead: how many, or `auto`, once steps wait for data.",
    )
    @argument(
        "--profile", type=int, metavar="N", help="Trace N steps, and show what took how long."
    )
    @argument("--precision", choices=("bfloat16", "float16"), help="What Keras computes in.")
    @planning_arguments
    @argument("--detach", action="store_true", help="Go on when this notebook's kernel ends.")
    @cell_magic
    def dist_run(self, line: str, cell: str) -> None:
        """Run the cell once on every worker, or once for each batch, in the strategy's scope."""
        args = parse_argstring(self.dist_run, line)
        cluster = self._cluster("%%dist_run")
        check_name(args.output)
        step = step_options(args)
        if step is not None and step.data:
            self._bring(cluster, step.data)
        before = cluster.last_run
        try:
            cluster.run(
                cell,
                ranks=args.ranks,
                strategy=args.strategy,
                step=step,
                precision=args.precision,
                saving=parse_saving(
                    args.checkpoint,
                    args.save_every,
                    args.keep,
                    resume=args.resume,
                    shrink=args.shrink,
                ),
                guard=args.guard,
                max_heals=args.max_heals,
                once=args.once,
                hang_after_s=parse_seconds("--hang-after", args.hang_after),
                detach=args.detach,
                seed=args.seed,
                own_data=args.own_data,
                label=self._label(),
                header=f"%%dist_run {line}",
            )
        finally:  # of a run that failed, what it had reported is kept too
            if args.output and cluster.last_run is not before:
                self.shell.user_ns[args.output] = cluster.last_run

    @magic_arguments()
    @line_magic
    def dist_status(self, line: str) -> None:
        """Show every worker: where it runs, its devices, its memory, what it does."""
        parse_argstring(self.dist_status, line)
        show_once(self._cluster("%dist_status").status())

    @magic_arguments()
    @argument("cluster", nargs="?", default="", help="Its id; left out, the one that there is.")
    @argument("-o", "--output", metavar="NAME", help="Keep the run under this name.")
    @line_magic
    def dist_attach(self, line: str) -> None:
        """Take over the workers of a notebook whose kernel is gone, and follow their cell."""
        args = parse_argstring(self.dist_attach, line)
        check_name(args.output)
        self._refuse_running()
        self._brought = {}
        self._started = cluster = attach(args.cluster)
        show_once(cluster.status())
        try:
            cluster.follow()
        finally:
            if args.output:
                self.shell.user_ns[args.output] = cluster.last_run

    @magic_arguments()
    @line_magic
    def dist_hosts(self, line: str) -> None:
        """Show the host of each worker: address, devices, Python, folder, how it is reached."""
        parse_argstring(self.dist_hosts, line)
        show_once(self._cluster("%dist_hosts").hosts())

    @magic_arguments()
    @examining_arguments
    @line_magic
    def dist_doctor(self, line: str) -> None:
        """Look for what would go wrong: on the hosts of the workers, or on those that are named."""
        args = parse_argstring(self.dist_doctor, line)
        if names_hosts(args):
            show_once(examined(args))
        else:
            cluster = self._cluster("%dist_doctor")
            show_once(cluster.examine(data=args.data, checkpoint=args.checkpoint))

    @magic_arguments()
    @argument("--all", action="store_true", help="Also what earlier notebooks have left.")
    @line_magic
    def dist_stop(self, line: str) -> None:
        """End every worker."""
        args = parse_argstring(self.dist_stop, line)
        if self._runs() or not args.all:
            self._cluster("%dist_stop").stop()
            self._started = None
        for said in stop_all() if args.all else ():
            sys.stdout.write(f"nbdist: {said}\n")

    @magic_arguments()
    @line_magic
    def dist_restart(self, line: str) -> None:
        """Replace every worker by a fresh one, whatever it is stuck in."""
        parse_argstring(self.dist_restart, line)
        self._cluster("%dist_restart").restart()

    @magic_arguments()
    @resizing_arguments
    @line_magic
    def dist_resize(self, line: str) -> None:
        """Have fresh workers on other hosts, or on more or fewer: between cells."""
        args = parse_argstring(self.dist_resize, line)
        self._cluster("%dist_resize").resize(resized(args), go_on=args.go_on)

    @magic_arguments()
    @argument("rank", nargs="?", type=int, default=0, help="The rank; 0 if left out.")
    @line_magic
    def dist_logs(self, line: str) -> None:
        """Show all that a worker wrote."""
        args = parse_argstring(self.dist_logs, line)
        sys.stdout.write(self._cluster("%dist_logs").logs(args.rank))

    @magic_arguments()
    @argument("names", nargs="+", help="Names in the notebook.")
    @argument("-t", "--ranks", help="Only to these ranks, as in 0,2:4.")
    @line_magic
    def dist_push(self, line: str) -> None:
        """Copy objects of the notebook to the workers, under the same names."""
        args = parse_argstring(self.dist_push, line)
        cluster = self._cluster("%dist_push")
        missing = [name for name in args.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"no such name in the notebook: {', '.join(missing)}; define it first")
        cluster.push({name: self.shell.user_ns[name] for name in args.names}, ranks=args.ranks)

    @magic_arguments()
    @argument("names", nargs="+", help="Names on the workers.")
    @argument("-r", "-t", "--ranks", help="Only from these ranks, as in 0,2:4.")
    @argument("-o", "--output", metavar="NAME", help="The name in the notebook.")
    @line_magic
    def dist_pull(self, line: str) -> None:
        """Copy objects of the workers to the notebook.

        From one rank the object itself, from several a list in rank order.
        """
        args = parse_argstring(self.dist_pull, line)
        check_name(args.output)
        if args.output and len(args.names) > 1:
            raise UsageError(f"-o {args.output} names one object, and {len(args.names)} are pulled")
        pulled = self._cluster("%dist_pull").pull(args.names, ranks=args.ranks)
        for name in args.names:
            values = [objects[name] for objects in pulled.values()]
            self.shell.user_ns[args.output or name] = values[0] if len(values) == 1 else values

    @magic_arguments()
    @argument("names", nargs="+", help="Names on the workers, such as params or model.optimizer.")
    @line_magic
    def dist_show(self, line: str) -> None:
        """Show where arrays are: their shards, the devices that hold them, bytes on each."""
        args = parse_argstring(self.dist_show, line)
        display(self._cluster("%dist_show").show(*args.names))

    @magic_arguments()
    @argument("run", nargs="?", help="The run's id; all runs if left out.")
    @line_magic
    def dist_tensorboard(self, line: str) -> None:
        """Open TensorBoard on the runs that are kept, also on those under way."""
        show_once(self._boards.open(parse_argstring(self.dist_tensorboard, line).run))

    def end(self) -> None:
        """End the cluster with the notebook."""
        self._boards.close()
        if self._started is not None:
            self._started.stop()
            self._started = None
