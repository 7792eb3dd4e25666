"""Record which line of a cell runs at which time, to attribute launched work to lines.

Python reports every call, but lines only in the cell's own code. A cell that makes many Python
calls therefore runs somewhat slower. Its devices do not.
"""

from __future__ import annotations

import linecache
import sys
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

MOST_LINES = 1 << 20
"""Maximum number of recorded events, in 16 MB of memory; later lines are not recorded."""


class CellLines:
    """Recorder of the lines that the calling thread runs.

    Args:
        shell: IPython shell; it identifies the cells.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = dict(linecache.cache)
        self._times_ns: list[int] = []
        self._lines: list[int] = []
        self._follows = False

    @property
    def is_whole(self) -> bool:
        """True if all lines were recorded; False if a debugger traces the thread."""
        return self._follows and len(self._lines) < MOST_LINES

    def begin(self) -> None:
        """Start to record the lines of this thread."""
        self._follows = sys.gettrace() is None
        if self._follows:
            sys.settrace(self._on_call)

    def end(self) -> None:
        """Stop recording; the record is invalid if the cell replaced the trace function."""
        self._follows = self._follows and sys.gettrace() == self._on_call
        if self._follows:
            sys.settrace(None)

    def is_current(self, file: str) -> bool:
        """Return True if a file is a cell that started after `begin`: IPython renews its entry."""
        entry = linecache.cache.get(file)
        return entry is not None and entry is not self._before.get(file) and self.is_cell(file)

    def is_cell(self, file: str) -> bool:
        """Return True if a file is a cell of the notebook."""
        return self._shell.compile.format_code_name(file) is not None

    def cell(self, file: str) -> str:
        """Return the notebook's name of a cell, such as `In[3]`."""
        _, name = self._shell.compile.format_code_name(file)
        return str(name)

    def seconds(self, started_s: float, ended_s: float) -> float:
        """Return the duration of the cell in seconds, including its devices.

        Args:
            started_s: Start of the trace in seconds since the epoch; used if no line was recorded.
            ended_s: End of the last device operation in seconds since the epoch.
        """
        if not self._times_ns:
            return max(0.0, ended_s - started_s)
        return max(ended_s, self._times_ns[-1] / 1e9) - self._times_ns[0] / 1e9

    def at(self, time_ns: int) -> int:
        """Return the innermost line of the cell that ran at a time; 0 if none did.

        Args:
            time_ns: Nanoseconds since the epoch.
        """
        place = bisect_right(self._times_ns, time_ns)
        return self._lines[place - 1] if place else 0

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        del event, argument
        return self._on_line if self.is_current(frame.f_code.co_filename) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        del argument
        if event == "line":
            self._note(frame.f_lineno)
        elif event == "return":
            self._note(self._line_below(frame))
        return self._on_line

    def _line_below(self, frame: FrameType) -> int:
        """Return the line of the cell that continues after a function returns."""
        caller = frame.f_back
        while caller is not None and not self.is_current(caller.f_code.co_filename):
            caller = caller.f_back
        return caller.f_lineno if caller is not None else 0

    def _note(self, line: int) -> None:
        if len(self._lines) < MOST_LINES:
            full = len(self._lines) == MOST_LINES - 1
            self._times_ns.append(time.time_ns())
            self._lines.append(0 if full else line)
