"""Where a view is shown: in a notebook's output, or line by line in a terminal or a log."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from nbdist.records import RANK_VARIABLE

if TYPE_CHECKING:
    from types import ModuleType

    from nbdist.records import MimeBundle


class Picture(Protocol):
    """A view at one moment: HTML for a notebook, lines of text for everything else."""

    def html(self) -> str: ...

    def lines(self) -> list[str]: ...


class Surface(Protocol):
    """Shows one picture, and its later states in the same place."""

    def show(self, picture: Picture) -> None: ...


class NotebookSurface:
    """One display, updated in place; its text form is kept beside the HTML."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def show(self, picture: Picture) -> None:
        data = bundle(picture)
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class TextSurface:
    """Writes each line once, when it is first there; a line that changes is written again."""

    def __init__(self) -> None:
        self._written: list[str] = []

    def show(self, picture: Picture) -> None:
        lines = picture.lines()
        for index, line in enumerate(lines):
            if index >= len(self._written) or self._written[index] != line:
                sys.stdout.write(line + "\n")
        self._written = lines
        sys.stdout.flush()


def bundle(picture: Picture) -> MimeBundle:
    return {"text/html": picture.html(), "text/plain": "\n".join(picture.lines())}


def in_notebook() -> bool:
    """Whether displays reach a Jupyter front end: this process is a kernel, and no engine."""
    if RANK_VARIABLE in os.environ:
        return False
    return isinstance(get_ipython(), ZMQInteractiveShell)  # Colab's is one of its own


def marimo_notebook() -> ModuleType | None:
    """The module `marimo` in a cell of its notebook, where IPython's displays are not shown."""
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None


def new_surface() -> Surface:
    return NotebookSurface() if in_notebook() else TextSurface()


def show_once(picture: Picture) -> None:
    new_surface().show(picture)
