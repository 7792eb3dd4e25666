"""What a cell shows as text, for a browser that came when the cell ran already."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from nbdist.records import CaughtUp, TableMessage, TextMessage
from nbdist.telemetry.tail import FRAME_BYTES, States, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.telemetry.run_reader import StoredRun


class TextTail:
    """The state, what tables there are without their rows, and the text from its beginning on.

    The file is kept open: of a run that leaves nothing behind, the last words are still in it.

    Raises:
        OSError: the directory is gone.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._states = States(run)
        self._file = run.open_shown()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tables = 0
        self._caught_up = False

    @property
    def is_over(self) -> bool:
        return self._states.is_over

    def news(self) -> Iterator[str]:
        yield from self._states.news()
        while (table := self._run.table(self._tables)) is not None:
            self._tables += 1
            yield encoded(TableMessage(table=table))
        yield from self.last()
        if not self._caught_up:
            self._caught_up = True
            yield encoded(CaughtUp())

    def last(self) -> Iterator[str]:
        while written := self._file.read(FRAME_BYTES):
            text = self._decoder.decode(written)
            if text:
                yield encoded(TextMessage(text=text))

    def close(self) -> None:
        self._file.close()
