"""Choice of the surface that shows a run: widget, output of several types, or lines of text."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from IPython.core.getipython import get_ipython

from nbdist.views.run.live_display import LineSurface, OutputSurface
from nbdist.views.surface import in_notebook, marimo_notebook

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import RunViewName
    from nbdist.views.run.live_display import Feed, RunSurface


def run_surface(run: str, follow: Callable[[], Feed], view: RunViewName) -> RunSurface:
    """Where the run is shown.

    Args:
        run: its id; empty where it is not kept.
        follow: begins to read it from its first row; only if it is kept.
        view: see `Settings`.
    """
    marimo = marimo_notebook()
    if view == "text" or not (marimo or in_notebook()):
        return LineSurface()
    if run and (marimo or view == "widget" or (view == "auto" and _wants_widget())):
        # Importing anywidget takes half a second.
        from nbdist.views.run.widget import MarimoPlace, OutputPlace, WidgetSurface

        return WidgetSurface(MarimoPlace(marimo) if marimo else OutputPlace(run), follow)
    return OutputSurface(run) if marimo is None else LineSurface()


def _wants_widget() -> bool:
    """Whether the kernel's front end is one that has widgets and cannot have the extension.

    The kernel is not told. VS Code sets these variables where it starts one, and not in its
    terminals; a kernel that it found running has the name.
    """
    shell = get_ipython()
    names = shell.user_ns if shell is not None else {}
    in_code = not {"VSCODE_PID", "VSCODE_CWD"}.isdisjoint(os.environ)
    return in_code or "__vsc_ipynb_file__" in names or "google.colab" in sys.modules
