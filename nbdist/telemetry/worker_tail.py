"""Incremental reader of one worker of a run: its text and its stack."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, BinaryIO

from nbdist.records import CaughtUp, StackMessage, TextMessage
from nbdist.telemetry.tail import FRAME_BYTES, States, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import WorkerStack
    from nbdist.telemetry.run_reader import StoredRun

LOG_BYTES = 1 << 20
"""Most bytes of earlier text that a browser receives."""

_LEFT_OUT = "[{:,} bytes are left out: %dist_logs shows all text]\n"


class WorkerTail:
    """Messages about one worker: the state of the run, the worker's text, and its last stack.

    Args:
        run: the run.
        rank: rank of the worker.
    """

    def __init__(self, run: StoredRun, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._states = States(run)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._file: BinaryIO | None = None
        self._stack: WorkerStack | None = None
        self._caught_up = False

    @property
    def is_over(self) -> bool:
        return self._states.is_over

    def news(self) -> Iterator[str]:
        """Yield the messages that were not sent yet. Raises the errors of `News.news`."""
        yield from self._states.news()
        yield from self.last()
        stack = self._run.stack(self._rank)
        if stack is not None and stack != self._stack:
            self._stack = stack
            yield encoded(StackMessage(stack=stack))
        if not self._caught_up:
            self._caught_up = True
            yield encoded(CaughtUp())

    def last(self) -> Iterator[str]:
        if self._file is None:
            self._file = self._run.open_output(self._rank)
            yield from self._skip_earlier()
        while self._file is not None and (written := self._file.read(FRAME_BYTES)):
            if text := self._decoder.decode(written):
                yield encoded(TextMessage(text=text))

    def _skip_earlier(self) -> Iterator[str]:
        """Skip the text before the last `LOG_BYTES`, up to the end of a line."""
        if self._file is None:
            return
        size = self._file.seek(0, 2)
        self._file.seek(max(0, size - LOG_BYTES))
        if size > LOG_BYTES:
            self._file.readline()
            yield encoded(TextMessage(text=_LEFT_OUT.format(self._file.tell())))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
