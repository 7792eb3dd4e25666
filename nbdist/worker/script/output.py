"""Output of a rank of a program: text in a cell also belongs to its run, and its last error."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, TextIO

from nbdist.errors import AnotherRankError, NbdistError
from nbdist.records import Output, StreamName
from nbdist.worker.failure import user_frames

if TYPE_CHECKING:
    from types import TracebackType

    from nbdist.worker.runtime.rank_reporter import RankReporter


def report_output(reporter: RankReporter) -> None:
    """Also report what this process writes to `sys.stdout` and `sys.stderr` from now on.

    The streams stay the same objects: handlers of `logging` that have them are included. Text of
    child processes and of C libraries is only in the streams.

    Args:
        reporter: sends the text in a cell as records.
    """
    _report("stdout", sys.stdout, reporter)
    _report("stderr", sys.stderr, reporter)


def _report(stream: StreamName, file: TextIO, reporter: RankReporter) -> None:
    own, process = file.write, os.getpid()

    def write(text: str) -> int:
        count = own(text)
        if text and reporter.cell and os.getpid() == process:  # a fork has no sending thread
            reporter.send(Output(stream=stream, text=text, **reporter.record_fields()))
        return count

    file.write = write  # type: ignore[method-assign]


def shorten_errors(rank: int) -> None:
    """Print errors of nbdist that end this process without its own frames.

    The message of these errors is complete. A rank that only follows the failure of another one
    prints a line.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, AnotherRankError):
            words = "another rank failed, and its output contains the error"
            sys.stderr.write(f"nbdist: rank {rank} ends: {words}\n")
        elif isinstance(error, NbdistError):
            traceback.print_exception(kind, error, user_frames(error), chain=False)
        else:
            before(kind, error, frames)

    sys.excepthook = show
