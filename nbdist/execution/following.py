"""Live view of a stored run that another process writes, such as that of a job."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from nbdist.errors import UsageError
from nbdist.execution.saved_runs import SavedRun
from nbdist.telemetry.run_reader import StoredRun, search
from nbdist.telemetry.run_writer import RUN_FILE
from nbdist.telemetry.tail import Tail
from nbdist.views.run.cell_output import run_surface
from nbdist.views.run.live_display import RunPicture
from nbdist.views.run.summary import described, titled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbdist.settings import Settings


_END_S = 10.0
"""Seconds in which the end of a run must be stored after its program has ended.

The process that stores it waits 5 s for the last records (`program_runs.py`). It may be dead too.
"""


def _never() -> bool:
    return False


def follow(folder: Path, settings: Settings) -> SavedRun:
    """Show a run until it ends.

    JupyterLab reads the runs of its own folder (`NBDIST_RUNS_FOLDER`). Those of another folder have
    a view of widgets, or lines of text.

    Args:
        folder: folder of the run, or a folder of runs: then the newest one.
        settings: the folder of the runs that JupyterLab reads, and the view.

    Returns:
        The run.

    Raises:
        UsageError: the folder contains no run.
    """
    return show_run(_run_in(folder), settings)


def show_run(
    run: StoredRun, settings: Settings, has_ended: Callable[[], bool] = _never
) -> SavedRun:
    """Show a run until it ends.

    Args:
        run: the run.
        settings: see `follow`.
        has_ended: returns True if the program of the run has ended. nbdist then waits a limited
            time for the stored end of the run.

    Returns:
        The run.
    """
    saved = SavedRun(run)
    is_served = run.path.parent == settings.runs_path
    surface = run_surface(run.id, lambda: Tail(run), settings.view, is_served=is_served)
    shown, until = "", math.inf
    while True:
        if until == math.inf and has_ended():
            until = time.monotonic() + _END_S
        line = saved.line(0)
        text = f"{titled(line.state)}: {described(line.state, line.reached)}"
        if text != shown or surface.follows:
            surface.show(RunPicture((text,), None))
            shown = text
        if line.state.is_over or time.monotonic() > until:
            break
        time.sleep(surface.interval_s)
    surface.close(saved)
    return saved


def _run_in(folder: Path) -> StoredRun:
    path = folder.expanduser().absolute()
    if (path / RUN_FILE).is_file():
        return StoredRun(path)
    found = search(path).runs if path.is_dir() else ()
    if not found:
        raise UsageError(
            f"no run in {path}: name the folder that the program printed, or that of "
            "NBDIST_RUNS_FOLDER"
        )
    return found[0]
