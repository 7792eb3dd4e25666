"""Limit on the text of a cell in the notebook.

Text is written immediately up to a limit. Later text is shown as a tail that is replaced in place a
few times per second. The workers' logs contain all text.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbdist.views.surface import Surface, new_surface

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StreamName

TAIL_LINES = 20
TAIL_INTERVAL_S = 0.5
_LINE_LIMIT = 400


class Tail:
    """Text output of a cell.

    Args:
        limit: number of characters before the tail starts.
        keep: function that stores the written text, for front ends that connect later.
    """

    def __init__(self, limit: int, keep: Callable[[str], None]) -> None:
        self._left = limit
        self._keep = keep
        self._hidden = 0
        self._last: deque[str] = deque(maxlen=TAIL_LINES)
        self._surface: Surface = new_surface()
        self._shown_at = 0.0
        self._changed = False

    def write(self, stream: StreamName, text: str) -> None:
        """Write whole lines."""
        self._left -= len(text)
        if self._left >= 0:
            (sys.stderr if stream == "stderr" else sys.stdout).write(text)
            self._keep(text)
            return
        for line in text.splitlines():
            self._hidden += 1
            self._last.append(line[:_LINE_LIMIT])
        self._changed = True

    def write_message(self, line: str) -> None:
        """Write a line of nbdist. The limit does not apply to it."""
        sys.stderr.write(line)
        self._keep(line)

    def flush(self, *, everything: bool = False) -> None:
        """Flush the streams, and show the tail at most every `TAIL_INTERVAL_S`."""
        sys.stdout.flush()
        sys.stderr.flush()
        now = time.monotonic()
        if self._changed and (everything or now - self._shown_at >= TAIL_INTERVAL_S):
            self._surface.show(_TailPicture(self._hidden, tuple(self._last)))
            self._shown_at = now
            self._changed = False


@dataclass(frozen=True)
class _TailPicture:
    hidden: int
    last: tuple[str, ...]

    def _head(self) -> str:
        return (
            f"… {self.hidden:,} more lines, the last {len(self.last)} here: run %dist_logs RANK "
            "for all"
        )

    def html(self) -> str:
        head = f'<em style="color:var(--jp-ui-font-color2,#616161)">{escape(self._head())}</em>'
        return f"<pre>{head}\n{escape(chr(10).join(self.last))}</pre>"

    def lines(self) -> list[str]:
        return [self._head(), *self.last]
