"""Run view for front ends without the extension: the same page, with data from the kernel."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anywidget
import msgspec
import traitlets

from nbdist.records import Rows, Table
from nbdist.views.run.live_display import INTERVAL_S, OutputSurface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from nbdist.records import Columns
    from nbdist.views.run.live_display import Ended, Feed, RunPicture

PAGE_OPENS_S = 5.0
"""Seconds in which a page can open the widget. A slower page misses the earlier rows."""

MOST_AGAIN_BYTES = 1 << 16
MOST_BYTES = 1 << 17
"""Maximum bytes per update. A Jupyter server drops messages above 1 MB/s."""


class RunWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """Widget of one run. `labextension/src/widget.ts` is its front end.

    It receives no messages of the page. None arrive while a cell runs on ipykernel 7.4
    (https://github.com/ipython/ipykernel/issues/1564), and the widget is closed afterwards.
    """

    _esm = Path(__file__).parents[2] / "static" / "widget.js"

    state = traitlets.Dict(default_value=None, allow_none=True).tag(sync=True)
    tables: traitlets.List[object] = traitlets.List().tag(sync=True)


class Place(Protocol):
    """Output that contains a widget."""

    def show(self, picture: RunPicture, widget: RunWidget) -> None: ...

    def close(self, run: Ended) -> None:
        """Show the final picture. A widget would be empty in a saved notebook."""
        ...


class OutputPlace:
    """Jupyter output that contains the widget and other MIME types.

    Args:
        run: id of the run.
    """

    def __init__(self, run: str) -> None:
        self._output = OutputSurface(run)
        self.close = self._output.close

    def show(self, picture: RunPicture, widget: RunWidget) -> None:
        self._output.show(picture, *widget._repr_mimebundle_())


class MarimoPlace:
    """Output of a marimo cell. A cell has only one.

    Args:
        marimo: module `marimo`.
    """

    def __init__(self, marimo: ModuleType) -> None:
        self._marimo = marimo

    def show(self, picture: RunPicture, widget: RunWidget) -> None:
        self._marimo.output.replace(self._marimo.ui.anywidget(widget))

    def close(self, run: Ended) -> None:
        data = run._repr_mimebundle_()
        picture, text = data.get("text/html"), str(data["text/plain"])
        shown = self._marimo.Html(picture) if picture else self._marimo.plain_text(text)
        self._marimo.output.replace(shown)


class WidgetSurface:
    """Widget during the run, and a picture at its end.

    Args:
        place: output that contains the widget.
        follow: function that starts to read the run from its first row.
    """

    interval_s = INTERVAL_S
    follows = False
    has_picture = True

    def __init__(self, place: Place, follow: Callable[[], Feed]) -> None:
        self._place = place
        self._follow = follow
        self._feed = follow()
        self._widget: RunWidget | None = None
        self._columns: dict[int, Columns] = {}
        self._opened_at = 0.0
        self._sent_bytes = 0

    def show(self, picture: RunPicture) -> None:
        """Show the widget once, then only send data: a new output would recreate its view."""
        if self._widget is None:
            self._widget = RunWidget()
            self.follows = True
            self._opened_at = time.monotonic()
            self._send(self._widget, from_start=True)
            self._place.show(picture, self._widget)
            return
        opening = time.monotonic() - self._opened_at < PAGE_OPENS_S
        if again := opening and self._sent_bytes < MOST_AGAIN_BYTES:
            self._feed = self._follow()
        self._send(self._widget, from_start=again)

    def close(self, run: Ended) -> None:
        if self._widget is not None:
            self._place.close(run)
            self._widget.close()

    def _send(self, widget: RunWidget, *, from_start: bool) -> None:
        frames: list[bytes] = []
        tables: list[object] = []
        for message in self._news():
            if isinstance(message, bytes):
                frames.append(message)
                continue
            content = msgspec.json.decode(message)
            if content["type"] == "StateMessage":
                widget.state = content["state"]
            elif content["type"] == "TableMessage":
                tables.append(content["table"])
        self._send_tables(widget, [*([] if from_start else widget.tables), *tables])
        if frames:
            buffers = self._thinned(frames)
            self._sent_bytes = sum(map(len, buffers)) + (0 if from_start else self._sent_bytes)
            widget.send({"type": "Rows", "from_start": from_start}, buffers)

    def _news(self) -> Iterator[str | bytes]:
        with contextlib.suppress(
            OSError, msgspec.DecodeError
        ):  # the run was deleted: the view keeps its data
            yield from self._feed.news()

    def _send_tables(self, widget: RunWidget, tables: list[object]) -> None:
        for table in msgspec.convert(tables, list[Table]):
            self._columns[table.number] = table.columns
        widget.tables = tables

    def _thinned(self, frames: list[bytes]) -> list[bytes]:
        """Thin out rows to the same steps of every rank. Halves their number until they fit."""
        stride = 1
        while sum(map(len, frames)) > stride * MOST_BYTES:
            stride *= 2
        return [frame[:8] + self._rows(frame).every(stride).values for frame in frames]

    def _rows(self, frame: bytes) -> Rows:
        (number,) = struct.unpack_from("<d", frame)
        return Rows(rank=0, cell=0, columns=self._columns[int(number)], values=frame[8:])
