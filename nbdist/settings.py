"""Settings of a session, read once from environment variables."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Self

import msgspec
from jupyter_core.paths import jupyter_data_dir

from nbdist.errors import UsageError
from nbdist.records import RunViewName  # noqa: TC001

_PREFIX = "NBDIST_"


class Settings(msgspec.Struct, frozen=True, dict=True):
    """Settings that a user changes with `NBDIST_<NAME>` variables. Times are in seconds.

    Attributes:
        start_timeout_s: limit of each phase of a start.
        cell_grace_s: time that the other ranks have to stop after one has raised.
        interrupt_grace_s: time that ranks have to stop after an interrupt of the kernel.
        return_grace_s: time that workers wait for a new kernel after the notebook's has died.
        replace_wait_s: time that a recovery retries workers that cannot be started.
        queue_wait_s: time that a job may wait in a scheduler's queue.
        ssh_config: file for `ssh -F`; empty for the user's default.
        keep_idle_s: time that workers wait for a notebook after the end of a detached run.
        shown_output_characters: number of characters of a cell's output that the notebook shows
            line by line. Beyond it, only the tail is shown; `%dist_logs` shows everything.
        picture_bytes: largest size in the notebook of the picture of a run; 0 stores no picture.
        fold_wait_s: time that a line of output waits for the same line of the other ranks.
        worker_memory_bytes: memory of a worker after it has loaded its framework
            (measured with TensorFlow 2.21 in a forked engine: 362 MB).
        runs_folder: folder of the stored runs; empty for `nbdist/runs` in Jupyter's data folder.
        placements: file of the choices of `@nbdist.autoplace`; empty for
            `nbdist/placements.sqlite` in the user's cache (`XDG_CACHE_HOME`, or `~/.cache`).
        kept_runs: number of runs to store; 0 stores all.
        media_bytes: largest size of the histograms, images, tables and texts of a stored run.
        alert_command: command that receives alerts about runs as JSON on its standard input.
        view: display of a run in a cell's output: `lab` for JupyterLab with the extension,
            `widget` for front ends with Jupyter widgets, `text` for lines as in a terminal.
            `auto` selects `widget` in VS Code and Colab, else `lab`.
        telemetry: for measurement. False removes the cost of telemetry: workers report no steps and
            time no collectives, and nbdist stores no runs. Reports of epochs remain.
    """

    start_timeout_s: float = 180.0
    cell_grace_s: float = 1.0
    interrupt_grace_s: float = 3.0
    return_grace_s: float = 20.0
    replace_wait_s: float = 60.0
    queue_wait_s: float = 86_400.0
    ssh_config: str = ""
    keep_idle_s: float = 1800.0
    shown_output_characters: int = 20_000
    picture_bytes: int = 25_000
    fold_wait_s: float = 0.3
    worker_memory_bytes: int = 400_000_000
    runs_folder: str = ""
    placements: str = ""
    kept_runs: Annotated[int, msgspec.Meta(ge=0)] = 100
    media_bytes: Annotated[int, msgspec.Meta(ge=0)] = 50_000_000
    alert_command: str = ""
    view: RunViewName = "auto"
    telemetry: bool = True

    @functools.cached_property
    def runs_path(self) -> Path:
        """The folder of the runs. It may not exist yet."""
        if self.runs_folder:
            return Path(self.runs_folder).expanduser().absolute()
        return Path(jupyter_data_dir()) / "nbdist" / "runs"

    @functools.cached_property
    def placements_path(self) -> Path:
        """The file of the placements that `@nbdist.autoplace` chose. It may not exist yet."""
        if self.placements:
            return Path(self.placements).expanduser().absolute()
        return _cache() / "placements.sqlite"

    @property
    def wheels_path(self) -> Path:
        """The folder of the wheels for other hosts. It may not exist yet."""
        return _cache() / "wheels"

    @classmethod
    def from_environment(cls) -> Self:
        """Read the variable `NBDIST_<NAME>` of each field.

        Raises:
            UsageError: a value is invalid; the message contains its field.
        """
        given = {
            name: os.environ[f"{_PREFIX}{name.upper()}"]
            for name in cls.__struct_fields__
            if f"{_PREFIX}{name.upper()}" in os.environ
        }
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"invalid environment variable ({_PREFIX}...): {error}") from None


def _cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "nbdist"
