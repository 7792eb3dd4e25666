"""Magic `%%dist_trace`, on a cluster or in the notebook's kernel."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.magic import cell_magic, magics_class

from nbdist.cells.options import OPTIONS
from nbdist.errors import StartError, UsageError
from nbdist.magics.base import SharedClusterMagics
from nbdist.magics.options import OUTPUT, command, name_faults, options_from, parse
from nbdist.records import Option
from nbdist.session.tracing import TRACED_STEPS, trace_here, trace_on
from nbdist.views.trace import TracePicture

if TYPE_CHECKING:
    from argparse import Namespace

    from nbdist.records import CellOptions, Trace

_PLUGINS = ("xprof", "tensorboard_plugin_profile")
_INSTALL = "%pip install tensorboard xprof"
_KEEP = Option(
    flags=("--keep",),
    metavar="FOLDER",
    help="Store the files of the profiler in this folder. "
    "In `%%dist_run`, `--keep` is a number of checkpoints.",
)
_RANKS_ONLY = ("ranks", "strategy", "data", "batch", "steps")


@magics_class
class TraceMagics(SharedClusterMagics):
    """Magics for traces."""

    _traces: tempfile.TemporaryDirectory[str] | None = None

    @command(
        *(OPTIONS[name] for name in ("ranks", "data", "batch")),
        OPTIONS["strategy"].but(
            default="pjrt", help="Strategy of the cell; only JAX is traced.", details=""
        ),
        OPTIONS["steps"].but(default=str(TRACED_STEPS), help="Trace N steps."),
        _KEEP,
        OUTPUT.but(help="Store the trace under this name."),
    )
    @cell_magic
    def dist_trace(self, line: str, cell: str) -> TracePicture:
        """Run the cell under JAX's profiler, and show its time by operation, device and line.

        Without workers, nbdist traces the cell in this kernel.
        """
        args = parse(self.dist_trace, line)
        options = _options(args)
        keep = str(Path(args.keep).resolve()) if args.keep else self._folder()
        header = f"%%dist_trace {line}"
        pictures: list[TracePicture] = []

        def show(trace: Trace) -> None:
            pictures.append(self._show(trace, args.output))

        if not self._front.has_cluster():
            _refuse_alone(args)
            trace_here(self.shell, cell, keep=keep, show=show, header=header)
            return pictures[0]
        cluster = self._front.running_cluster("%%dist_trace")
        if options.step is not None:
            self._front.move_data(cluster, options.step.data)
        trace_on(
            cluster,
            cell,
            options,
            keep=keep,
            show=show,
            label=self._front.cell_number(),
            header=header,
        )
        return pictures[0]

    def _folder(self) -> str:
        """Return the folder of all traces of this kernel; empty if TensorBoard cannot show them."""
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
        """Return the address of the trace's viewer, or instructions to install one."""
        if not trace.ranks:
            return ""
        kept = f"the profiler's files are in {trace.folder}; " if trace.folder else ""
        if not _can_view():
            return f"{kept}to see every operation over time, run {_INSTALL}, and trace again"
        try:
            board = self._front.boards.open_folder(Path(trace.folder), "traces")
        except StartError as error:
            return f"{kept}{error}"
        return f"every operation over time: {board.address}"


def _can_view() -> bool:
    return importlib.util.find_spec("tensorboard") is not None and any(
        importlib.util.find_spec(name) is not None for name in _PLUGINS
    )


def _options(args: Namespace) -> CellOptions:
    """Return the options of the cell.

    Raises:
        UsageError: options are wrong. The message contains all faults.
    """
    faults = name_faults(args.output)
    kept = Path(args.keep or ".")
    if kept.exists() and not kept.is_dir():
        faults.append(f"--keep {kept} is a file: use a folder")
    try:
        options = options_from(args, keep=None)  # `--keep` of this magic is a folder
    except UsageError as error:
        raise UsageError("\n".join((*faults, str(error)))) from None
    if faults:
        raise UsageError("\n".join(faults))
    return options


def _refuse_alone(args: Namespace) -> None:
    """Raise UsageError for options that need workers."""
    given = [OPTIONS[name].flag for name in _RANKS_ONLY if getattr(args, name) is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)}: no workers are running: run %dist_start 4 hosts first, or "
            "trace in this kernel without these options"
        )
