"""Output of a rank of a program: text that it writes in a cell also belongs to its run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from nbdist.records import Output, StreamName

if TYPE_CHECKING:
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
