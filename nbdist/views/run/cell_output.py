"""Output of a running cell: text folded over ranks, displays, metrics, and its run."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Protocol

import msgspec
from IPython.core.getipython import get_ipython
from IPython.display import display

from nbdist.records import (
    Checked,
    Display,
    FitBegun,
    Metrics,
    MimeBundle,
    Note,
    Output,
    Planned,
    Profiled,
    Rows,
    StepBegun,
    StreamName,
)
from nbdist.views import formatting
from nbdist.views.plan.text import plan_lines
from nbdist.views.run.folding import Folder
from nbdist.views.run.live_display import LineSurface, OutputSurface
from nbdist.views.run.metrics import MetricsLines
from nbdist.views.run.profile import ProfilePicture
from nbdist.views.run.step_header import CheckPicture, header_lines
from nbdist.views.run.throttling import Tail
from nbdist.views.surface import in_notebook, marimo_notebook, show_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.records import RecoveryRecord, RunViewName
    from nbdist.views.run.live_display import Ended, Feed, RunSurface, RunView


Shareable = (
    Output | Display | Metrics | Rows | StepBegun | FitBegun | Note | Checked | Profiled | Planned
)
"""Records of ranks that the output shows."""

_OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")


class View(Protocol):
    """View of a running cell."""

    def add(self, record: Shareable) -> None:
        """Add a record. `flush` shows it."""
        ...

    def flush(self) -> None:
        """Show the records that are ready."""
        ...

    def show_message(self, line: str) -> None:
        """Show a line about the run as a whole."""
        ...

    def resume(self, begun: StepBegun | FitBegun) -> None:
        """Continue with steps that another process started and announced."""
        ...

    def recovering(self, reason: str) -> None:
        """Show that ranks are being replaced, with the reason."""
        ...

    def recovered(self, recovery: RecoveryRecord) -> None:
        """Show that the ranks were replaced and the run continues."""
        ...

    def shrink(self, host_of: Mapping[int, str]) -> None:
        """Restrict the cell to these ranks."""
        ...

    def close(self, run: Ended, remarks: tuple[str, ...]) -> None:
        """Show the remaining records, the final state of the run, and remarks.

        Args:
            run: the ended run.
            remarks: lines about the run.
        """
        ...


class Line(msgspec.Struct, frozen=True):
    """Line of text that a rank wrote, without its line end."""

    stream: StreamName
    text: str


class Shown(msgspec.Struct, frozen=True):
    """Rich display, or the value of the cell's last expression."""

    data: MimeBundle
    metadata: MimeBundle
    result: bool
    display_id: str = ""
    update: bool = False


class CellView:
    """Live view of one cell's records.

    Called only from the notebook's main thread, so that the output belongs to the cell.

    Args:
        host_of: host of each rank that runs the cell.
        fold_wait_s: see `Settings`.
        shown_output_characters: see `Settings`.
        run: view of the run.
        keep: function that stores the shown text, for front ends that connect later.
    """

    def __init__(
        self,
        host_of: Mapping[int, str],
        fold_wait_s: float,
        shown_output_characters: int,
        run: RunView,
        keep: Callable[[str], None],
    ) -> None:
        self._fold_wait_s = fold_wait_s
        self._of_ranks(host_of)
        self._keep = keep
        self._tail = Tail(shown_output_characters, keep)
        self._run = run
        self._begun = False
        self._passed: bool | None = None
        self._profiles: dict[int, Profiled] = {}

    def _of_ranks(self, host_of: Mapping[int, str]) -> None:
        self._host_of = host_of
        self._folder: Folder[Line | Shown] = Folder(host_of, self._fold_wait_s)
        self._partial: dict[tuple[int, StreamName], str] = {}
        self._metrics = MetricsLines(host_of)

    def add(self, record: Shareable) -> None:
        """Add a record. `flush` shows it."""
        if isinstance(record, Output):
            self._add_text(record)
        elif isinstance(record, Note):
            self._folder.add(
                record.rank, Line("stderr" if record.warning else "stdout", record.text)
            )
        elif isinstance(record, Checked):
            self._show_check(record)
        elif isinstance(record, Planned):
            for text in () if record.only else plan_lines(record.plan):
                self.show_message(text)
        elif isinstance(record, Profiled):
            self._profiles[record.rank] = record
            if len(self._profiles) == len(self._host_of):
                self._show_profiles()
        elif isinstance(record, Display):
            self._add_display(record)
        else:
            self._add_report(record)

    def _add_display(self, record: Display) -> None:
        if not record.update:
            self._end_lines(record.rank)
        # A display with an id may be updated later, so it is not folded with other ranks.
        own_id = f"{record.rank}-{record.display_id}" if record.display_id else ""
        data = record.data
        if record.result and set(data) == {"text/plain"}:
            # Addresses of objects differ between ranks and mean nothing in the notebook.
            data = {"text/plain": _ADDRESS.sub("", str(data["text/plain"]))}
        shown = Shown(data, record.metadata, record.result, own_id, record.update)
        self._folder.add(record.rank, shown)

    def _add_report(self, record: Metrics | Rows | StepBegun | FitBegun) -> None:
        if isinstance(record, StepBegun):
            self._begin(record)
        elif isinstance(record, FitBegun):
            self._run.begin(record)
        elif isinstance(record, Metrics):
            self._metrics.add(record)
            self._run.add_epoch(record)
        else:
            self._run.add(record)
            if not record.columns.measures:  # reported by the cell's own code
                for metrics in record.unpacked():
                    self._metrics.add(metrics)

    def _begin(self, begun: StepBegun) -> None:
        """Start the view at the first report. All ranks report the same."""
        if not self._begun:
            self._begun = True
            self._run.begin(begun)
            for line in header_lines(begun):
                self._tail.write("stdout", line + "\n")

    def resume(self, begun: StepBegun | FitBegun) -> None:
        self._begun = True
        self._run.begin(begun)

    def _show_check(self, checked: Checked) -> None:
        """Show the first check, and the first failed one: ranks may find different differences."""
        passes = all(d.passes for d in checked.differences)
        if self._passed is None or (self._passed and not passes):
            self._tail.flush(everything=True)
            show_once(CheckPicture(checked))
            self._passed = passes

    def _show_profiles(self) -> None:
        self._tail.flush(everything=True)
        show_once(ProfilePicture(self._profiles))
        self._profiles = {}

    def flush(self, *, everything: bool = False) -> None:
        """Show the records that are ready, or all records with `everything`."""
        if everything:
            for rank in self._host_of:
                self._end_lines(rank)
            if self._profiles:  # some rank failed and reports no profile
                self._show_profiles()
        for folded in self._folder.take(everything=everything):
            if isinstance(folded.item, Line):
                text = f"{self._label(folded.ranks)} {folded.item.text}\n"
                self._tail.write(folded.item.stream, text)
            else:
                self._show(folded.ranks, folded.item)
        for line in self._metrics.take(everything=everything):
            self._tail.write("stdout", line + "\n")
        self._tail.flush(everything=everything)
        self._run.flush(everything=everything)

    def show_message(self, line: str) -> None:
        """Show a line about the run as a whole."""
        self._tail.write_message(f"nbdist: {line}\n")

    def recovering(self, reason: str) -> None:
        self._run.recovering(reason)

    def shrink(self, host_of: Mapping[int, str]) -> None:
        self.flush(everything=True)
        self._of_ranks(host_of)

    def recovered(self, recovery: RecoveryRecord) -> None:
        self._run.recovered(recovery)
        self._metrics.restart()
        self.show_message(formatting.recovered(recovery))

    def close(self, run: Ended, remarks: tuple[str, ...]) -> None:
        self.flush(everything=True)
        self._run.close(run)
        for line in remarks:
            self.show_message(line)
        self._tail.flush(everything=True)

    def _add_text(self, record: Output) -> None:
        key = (record.rank, record.stream)
        *lines, rest = (self._partial.get(key, "") + record.text).split("\n")
        for line in lines:
            self._folder.add(
                record.rank, Line(record.stream, _OVERWRITTEN.sub("", line.rstrip("\r")))
            )
        self._partial[key] = _OVERWRITTEN.sub("", rest)

    def _end_lines(self, rank: int) -> None:
        """Show text without a line end as a line, because other output follows it."""
        for key in [key for key in self._partial if key[0] == rank]:
            rest = self._partial.pop(key)
            if rest:
                self._folder.add(rank, Line(key[1], rest))

    def _label(self, ranks: tuple[int, ...]) -> str:
        return formatting.places(ranks, self._host_of)

    def _show(self, ranks: tuple[int, ...], shown: Shown) -> None:
        plain = str(shown.data.get("text/plain", ""))
        if get_ipython() is None and marimo_notebook() is None:
            if shown.update or not plain:
                return  # without IPython, `display` would print the dict
        elif not set(shown.data) <= {"text/plain"} or shown.display_id:
            self._display(ranks, shown)
            return
        mark = "Out: " if shown.result else ""
        separator = "\n" if "\n" in plain else ""
        self._tail.write("stdout", f"{self._label(ranks)} {mark}{separator}{plain}\n")

    def _display(self, ranks: tuple[int, ...], shown: Shown) -> None:
        self._tail.flush(everything=True)
        if not shown.update:
            label = f"{self._label(ranks)}\n"
            sys.stdout.write(label)
            sys.stdout.flush()
            self._keep(label)
        display(
            shown.data,
            raw=True,
            metadata=shown.metadata,
            display_id=shown.display_id or None,
            update=shown.update,
        )


class SilentView:
    """View that shows nothing, for a cell that is run again."""

    def add(self, record: Shareable) -> None: ...

    def flush(self) -> None: ...

    def show_message(self, line: str) -> None: ...

    def resume(self, begun: StepBegun | FitBegun) -> None: ...

    def recovering(self, reason: str) -> None: ...

    def recovered(self, recovery: RecoveryRecord) -> None: ...

    def shrink(self, host_of: Mapping[int, str]) -> None: ...

    def close(self, run: Ended, remarks: tuple[str, ...]) -> None: ...


def run_surface(
    run: str, follow: Callable[[], Feed], view: RunViewName, *, is_served: bool = True
) -> RunSurface:
    """Return the surface of a run.

    Args:
        run: id of the run, empty if it is not stored.
        follow: function that starts to read the run from its first row. Used only if it is stored.
        view: see `Settings`.
        is_served: False if the run is in another folder than the runs that JupyterLab reads.
    """
    marimo = marimo_notebook()
    if view == "text" or not (marimo or in_notebook()):
        return LineSurface()
    wants_widget = view == "widget" or (view == "auto" and _wants_widget())
    if run and (marimo or wants_widget or not is_served):
        # Importing anywidget takes half a second.
        from nbdist.views.run.widget import MarimoPlace, OutputPlace, WidgetSurface

        place = MarimoPlace(marimo) if marimo else OutputPlace(run if is_served else "")
        return WidgetSurface(place, follow)
    return OutputSurface(run) if marimo is None else LineSurface()


def _wants_widget() -> bool:
    """Return True if the front end supports widgets but cannot have the extension.

    The kernel receives no such information. VS Code sets these variables if it starts the kernel,
    but not in its terminals. In a kernel that was already running, it sets the name.
    """
    shell = get_ipython()
    names = shell.user_ns if shell is not None else {}
    in_code = not {"VSCODE_PID", "VSCODE_CWD"}.isdisjoint(os.environ)
    return in_code or "__vsc_ipynb_file__" in names or "google.colab" in sys.modules
