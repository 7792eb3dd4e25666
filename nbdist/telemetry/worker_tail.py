"""Incremental readers of one worker: its text and stack in a run, or its text in a cluster."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, BinaryIO

from nbdist.records import CaughtUp, StackMessage, TextMessage
from nbdist.telemetry.output_logs import LOG_FOLDER, OutputLogs
from nbdist.telemetry.tail import FRAME_BYTES, States, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.records import WorkerStack
    from nbdist.telemetry.run_reader import StoredRun

LOG_BYTES = 1 << 20
"""Most bytes of earlier text that a browser receives."""

_LEFT_OUT = "[{:,} bytes are left out: %dist_logs shows all text]\n"


class LogTail:
    """Messages with the text of a log file, from its last `LOG_BYTES` on.

    Args:
        open_log: opens the file. Returns None if it does not exist yet.
    """

    def __init__(self, open_log: Callable[[], BinaryIO | None]) -> None:
        self._open_log = open_log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._file: BinaryIO | None = None

    def news(self) -> Iterator[str]:
        """Yield the text that was not sent yet."""
        if self._file is None:
            self._file = self._open_log()
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


class WorkerTail:
    """Messages about one worker of a run: the state of the run, the worker's text and last stack.

    Args:
        run: the run.
        rank: rank of the worker.
    """

    def __init__(self, run: StoredRun, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._states = States(run)
        self._log = LogTail(lambda: run.open_output(rank))
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
        yield from self._log.news()

    def close(self) -> None:
        self._log.close()


class ClusterLogTail:
    """Messages with the text of all cells of one worker of a cluster.

    Args:
        folder: folder of the cluster.
        rank: rank of the worker.
    """

    is_over = False

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._path = OutputLogs(folder / LOG_FOLDER).path(rank)
        self._log = LogTail(self._open)
        self._caught_up = False

    def news(self) -> Iterator[str]:
        """Yield the text that was not sent yet.

        Raises:
            FileNotFoundError: the cluster has ended.
        """
        if not self._folder.is_dir():
            raise FileNotFoundError(f"{self._folder} was deleted")
        yield from self.last()
        if not self._caught_up:
            self._caught_up = True
            yield encoded(CaughtUp())

    def last(self) -> Iterator[str]:
        yield from self._log.news()

    def close(self) -> None:
        self._log.close()

    def _open(self) -> BinaryIO | None:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return None
