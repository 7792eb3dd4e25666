"""Which line of a cell is under way when: what is launched meanwhile is that line's.

Python tells of every call, and of every line in the cell's own code only: a cell that calls much
Python takes somewhat longer so, and its devices as long as ever.
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
"""Of a cell that runs through more, the later ones are not followed: they take 16 MB."""


class CellLines:
    """Follows the thread that begins it.

    Args:
        shell: IPython's, which knows its cells.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = dict(linecache.cache)
        self._times_ns: list[int] = []
        self._lines: list[int] = []
        self._follows = False

    @property
    def is_whole(self) -> bool:
        """Whether all lines were followed; none are where a debugger follows them."""
        return self._follows and len(self._lines) < MOST_LINES

    def begin(self) -> None:
        """Follow this thread from here on."""
        self._follows = sys.gettrace() is None
        if self._follows:
            sys.settrace(self._called)

    def end(self) -> None:
        """Follow it no more; where the cell has set another function in our place, it was not."""
        self._follows = self._follows and sys.gettrace() == self._called
        if self._follows:
            sys.settrace(None)

    def is_current(self, file: str) -> bool:
        """Whether a file is a cell that has begun since; IPython writes down each one anew."""
        entry = linecache.cache.get(file)
        return entry is not None and entry is not self._before.get(file) and self.is_cell(file)

    def is_cell(self, file: str) -> bool:
        """Whether a file is any cell of the notebook."""
        return self._shell.compile.format_code_name(file) is not None

    def cell(self, file: str) -> str:
        """What the notebook calls a cell, as in `In[3]`."""
        _, name = self._shell.compile.format_code_name(file)
        return str(name)

    def seconds(self, started_s: float, ended_s: float) -> float:
        """How long the cell took, its devices included.

        Args:
            started_s: when the trace began; the cell did then where it has no lines.
            ended_s: when the last device was done; both since the epoch.
        """
        if not self._times_ns:
            return max(0.0, ended_s - started_s)
        return max(ended_s, self._times_ns[-1] / 1e9) - self._times_ns[0] / 1e9

    def at(self, time_ns: int) -> int:
        """The line of the cell that was under way; the inmost, and 0 where there was none.

        Args:
            time_ns: since the epoch.
        """
        place = bisect_right(self._times_ns, time_ns)
        return self._lines[place - 1] if place else 0

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        del event, argument
        return self._went_on if self.is_current(frame.f_code.co_filename) else None

    def _went_on(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        del argument
        if event == "line":
            self._note(frame.f_lineno)
        elif event == "return":
            self._note(self._line_below(frame))
        return self._went_on

    def _line_below(self, frame: FrameType) -> int:
        """The line of the cell that goes on when a function of it has ended."""
        caller = frame.f_back
        while caller is not None and not self.is_current(caller.f_code.co_filename):
            caller = caller.f_back
        return caller.f_lineno if caller is not None else 0

    def _note(self, line: int) -> None:
        if len(self._lines) < MOST_LINES:
            full = len(self._lines) == MOST_LINES - 1
            self._times_ns.append(time.time_ns())
            self._lines.append(0 if full else line)
