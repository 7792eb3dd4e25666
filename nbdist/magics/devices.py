"""Magics about what runs where on devices, with a cluster or in the notebook's own kernel."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from nbdist.cells.parse import STRATEGIES
from nbdist.errors import StartError, UsageError
from nbdist.magics.options import unquoted
from nbdist.parallel.placement.devices import devices_apart
from nbdist.records import StepOptions
from nbdist.session.tracing import trace_here, trace_on
from nbdist.views.trace import TracePicture

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.magics.base import ClusterMagics
    from nbdist.records import Trace
    from nbdist.views.cluster.devices import DevicesPicture

_PLUGINS = ("xprof", "tensorboard_plugin_profile")
_INSTALL = "%pip install tensorboard xprof"
_RANKS_ONLY = ("ranks", "strategy", "data", "batch", "steps")


@magics_class
class PlacingMagics(Magics):
    """Beside `DistMagics`, which has the cluster."""

    shell: Any

    def __init__(self, shell: InteractiveShell, front: ClusterMagics) -> None:
        super().__init__(shell)
        self._front = front
        self._traces: tempfile.TemporaryDirectory[str] | None = None

    @magic_arguments()
    @argument(
        "--bench",
        action="store_true",
        help="Measure products, memory, transfers and links; steps are planned with that.",
    )
    @line_magic
    def dist_devices(self, line: str) -> DevicesPicture:
        """Show the devices of all workers, or without any this machine's, and their links."""
        bench = parse_argstring(self.dist_devices, line).bench
        if self._front._runs():
            return self._front.shown(self._front._cluster("%dist_devices").devices(bench=bench))
        return self._front.shown(devices_apart(bench=bench))

    @magic_arguments()
    @argument("-t", "--ranks", help="Ranks to run on, as in 0,2:4, for cells without collectives.")
    @argument("--strategy", choices=STRATEGIES, help="`pjrt`: only JAX is traced.")
    @argument("-o", "--output", metavar="NAME", help="Keep the trace under this name.")
    @argument("--keep", metavar="FOLDER", help="Keep the profiler's files in this folder.")
    @argument("--data", metavar="NAME", help="The cell is a step, run for batches of this data.")
    @argument("--batch", type=int, metavar="N", help="Samples in a global batch.")
    @argument("--steps", type=int, metavar="N", help="Steps that are traced; 20 if left out.")
    @cell_magic
    def dist_trace(self, line: str, cell: str) -> TracePicture:
        """Run the cell under JAX's profiler, and show which operation, device and line took long.

        On every worker, or on those that are named; in this kernel where no workers run.
        """
        args = parse_argstring(self.dist_trace, line)
        _check(args)
        keep = str(Path(unquoted(args.keep)).resolve()) if args.keep else self._folder()
        header = f"%%dist_trace {line}"
        pictures: list[TracePicture] = []

        def show(trace: Trace) -> None:
            pictures.append(self._show(trace, args.output))

        if not self._front._runs():
            _refuse_alone(args)
            trace_here(self.shell, cell, keep=keep, show=show, header=header)
            return pictures[0]
        cluster, step = self._front._cluster("%%dist_trace"), _step(args)
        if step is not None:
            self._front._bring(cluster, step.data)
        trace_on(
            cluster,
            cell,
            ranks=args.ranks,
            strategy=args.strategy,
            step=step,
            keep=keep,
            show=show,
            label=self._front._label(),
            header=header,
        )
        return pictures[0]

    def _folder(self) -> str:
        """One for all traces of this kernel, that TensorBoard can show; empty where it cannot."""
        if not _can_view():
            return ""
        if self._traces is None:
            self._traces = tempfile.TemporaryDirectory(prefix="nbdist-traces-")
        return self._traces.name

    def _show(self, trace: Trace, output: str | None) -> TracePicture:
        if output:
            self.shell.user_ns[output] = trace
        return self._front.shown(TracePicture(trace, self._viewer(trace)))

    def _viewer(self, trace: Trace) -> str:
        """Where the profiler's files can be seen, or what that takes."""
        if not trace.ranks:
            return ""
        kept = f"the profiler's files are in {trace.folder}; " if trace.folder else ""
        if not _can_view():
            return f"{kept}to see every operation over time, type {_INSTALL}, and trace again"
        try:
            board = self._front._boards.open_folder(Path(trace.folder), "traces")
        except StartError as error:
            return f"{kept}{error}"
        return f"every operation over time: {board.address}"


def _can_view() -> bool:
    return importlib.util.find_spec("tensorboard") is not None and any(
        importlib.util.find_spec(name) is not None for name in _PLUGINS
    )


def _check(args: Any) -> None:
    """Raises UsageError that names every option that is wrong."""
    faults = []
    if args.output and not args.output.isidentifier():
        faults.append(f"-o {args.output}: type a name that Python can use")
    kept = Path(unquoted(args.keep or "."))
    if kept.exists() and not kept.is_dir():
        faults.append(f"--keep {kept}: there is a file of that name; name a folder")
    if not args.data:
        idle = [f"--{name}" for name in ("batch", "steps") if getattr(args, name) is not None]
        faults += [f"{', '.join(idle)} without --data: name the data set of the step"] * bool(idle)
    if faults:
        raise UsageError("\n".join(faults))


def _refuse_alone(args: Any) -> None:
    """Raises UsageError for options that are for workers, where none run."""
    given = [f"--{name}" for name in _RANKS_ONLY if getattr(args, name) is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)}: no workers run, and the cell is traced in this kernel: leave "
            "that out, or type %dist_start 4 hosts first"
        )


def _step(args: Any) -> StepOptions | None:
    if not args.data:
        return None
    return StepOptions(data=args.data, batch=args.batch or 0, steps=args.steps or 0)
