"""Surfaces that show a view: a notebook output, or lines in a terminal or a log."""

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
    """State of a view: HTML for a notebook, lines of text for other outputs."""

    def html(self) -> str: ...

    def lines(self) -> list[str]: ...


class Surface(Protocol):
    """Surface that shows a picture and later replaces it by newer ones."""

    def show(self, picture: Picture) -> None: ...


class NotebookSurface:
    """Display that is updated in place. Its text form is stored next to the HTML."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def show(self, picture: Picture) -> None:
        data = bundle(picture)
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class TextSurface:
    """Text output that writes a line when it is new or has changed."""

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
    """Return True if displays reach a Jupyter front end: in a kernel that is not an engine."""
    if RANK_VARIABLE in os.environ:
        return False
    return isinstance(get_ipython(), ZMQInteractiveShell)  # Colab's shell is a subclass


def marimo_notebook() -> ModuleType | None:
    """Return the module `marimo` in a marimo cell. IPython displays are not shown there."""
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None


def new_surface() -> Surface:
    return NotebookSurface() if in_notebook() else TextSurface()


def show_once(picture: Picture) -> None:
    new_surface().show(picture)
