"""The settings of one session: one frozen object, the environment read once."""

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
    """What a user may set through `NBDIST_<NAME>` variables; every time is in seconds.

    Attributes:
        start_timeout_s: bound on each phase of a start.
        cell_grace_s: how long the other ranks get to stop after one has raised.
        interrupt_grace_s: how long ranks get to stop after an interrupt of the kernel.
        return_grace_s: how long workers wait for another kernel when the notebook's has died.
        replace_wait_s: how long a run that is recovered waits for workers that cannot be started.
        queue_wait_s: how long a job may wait in a scheduler's queue.
        ssh_config: of `ssh`, for its `-F`; empty for the user's own.
        keep_idle_s: how long they are kept for one after the end of a run that went on without.
        shown_output_characters: text of a cell shown line by line in the notebook; beyond it
            only the tail is shown, and `%dist_logs` has the whole.
        fold_wait_s: how long a line waits for the same line of the other ranks.
        worker_memory_bytes: memory that a worker takes when its framework is loaded
            (measured on TensorFlow 2.21: 362 MB in a forked engine, 2026-11).
        runs_folder: where runs are kept; empty for `nbdist/runs` among Jupyter's data.
        placements: the file in which `@nbdist.autoplace` keeps its choices; empty for
            `nbdist/placements.sqlite` in the user's cache (`XDG_CACHE_HOME`, or `~/.cache`).
        kept_runs: how many runs are kept; 0 keeps all.
        view: how a cell's output shows a run: `lab` for JupyterLab with the extension, `widget`
            for front ends that have Jupyter widgets instead, `text` for lines as in a terminal;
            `auto` is `widget` in VS Code and Colab, else `lab`.
    """

    start_timeout_s: float = 180.0
    cell_grace_s: float = 1.0
    interrupt_grace_s: float = 3.0
    return_grace_s: float = 20.0
    replace_wait_s: float = 60.0
    queue_wait_s: float = 86_400.0
    ssh_config: str = ""
    keep_idle_s: float = 1800.0
    shown_output_characters: int = 400_000
    fold_wait_s: float = 0.3
    worker_memory_bytes: int = 400_000_000
    runs_folder: str = ""
    placements: str = ""
    kept_runs: Annotated[int, msgspec.Meta(ge=0)] = 100
    view: RunViewName = "auto"

    @functools.cached_property
    def runs_path(self) -> Path:
        """The folder of the runs; it need not be there yet."""
        if self.runs_folder:
            return Path(self.runs_folder).expanduser().absolute()
        return Path(jupyter_data_dir()) / "nbdist" / "runs"

    @functools.cached_property
    def placements_path(self) -> Path:
        """The file of choices of places; it need not be there yet."""
        if self.placements:
            return Path(self.placements).expanduser().absolute()
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(cache).expanduser() / "nbdist" / "placements.sqlite"

    @classmethod
    def from_environment(cls) -> Self:
        """Read `NBDIST_<NAME>` for every field.

        Raises:
            UsageError: a value is not what it can be; it is named.
        """
        given = {
            name: os.environ[f"{_PREFIX}{name.upper()}"]
            for name in cls.__struct_fields__
            if f"{_PREFIX}{name.upper()}" in os.environ
        }
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"a setting in the environment ({_PREFIX}...): {error}") from None
