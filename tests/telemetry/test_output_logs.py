"""Logs of the ranks' output over all cells of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from nbdist.records import CellEnded, Display, Failure, Output
from nbdist.telemetry.output_logs import OutputLogs
from nbdist.telemetry.receiver import Receiver
from nbdist.utils.polling import repeat_until
from tests.telemetry.test_receiver import reporter_of

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 20.0


def text(rank: int, cell: int, text: str) -> Output:
    return Output(rank=rank, cell=cell, stream="stdout", text=text)


def test_heading_with_the_name_of_a_cell_precedes_its_text(tmp_path: Path) -> None:
    logs = OutputLogs(tmp_path)
    logs.begin(1, "Cell 3, 20:27")
    logs.take(text(0, 1, "first\n"))
    logs.take(text(0, 1, "no end"))
    logs.take(text(0, 0, " of the line"))
    logs.begin(2, "two\nlines")
    logs.take(text(0, 1, ", late"))
    logs.take(Display(rank=0, cell=2, data={"text/plain": "second"}, metadata={}))
    logs.take(text(1, 2, "other rank\n"))
    assert logs.read(0) == (
        "── Cell 3, 20:27 ──\nfirst\nno end of the line, late\n── two lines ──\nsecond\n"
    )
    assert logs.read(1) == "── two lines ──\nother rank\n"
    logs.close()

    logs = OutputLogs(tmp_path)  # that of a process that takes over the cluster
    logs.begin(2, "two lines")
    logs.take(text(1, 2, "more\n"))
    assert logs.read(1) == "── two lines ──\nother rank\n\n── two lines ──\nmore\n"
    logs.close()


def ended(
    rank: int, *, follows: bool = False, status: Literal["error", "interrupted"] = "error"
) -> CellEnded:
    traceback = ("Traceback (most recent call last):", "ValueError: no", "of two lines")
    failure = Failure(
        ename="ValueError", evalue="no\nof two lines", traceback=traceback, same="", follows=follows
    )
    return CellEnded(rank=rank, cell=1, status=status, seconds=0.1, failure=failure)


def test_log_contains_the_traceback_of_the_error(tmp_path: Path) -> None:
    logs = OutputLogs(tmp_path)
    logs.begin(1, "Cell 3")
    logs.take(text(0, 1, "first\n"))
    logs.take(ended(0))
    logs.take(ended(1, follows=True))
    logs.take(ended(2, status="interrupted"))
    logs.take(CellEnded(rank=3, cell=1, status="ok", seconds=0.1))
    traceback = "Traceback (most recent call last):\nValueError: no\nof two lines\n"
    assert logs.read(0) == f"── Cell 3 ──\nfirst\n{traceback}"
    assert logs.read(1) == "── Cell 3 ──\nValueError: of two lines\n"
    assert not logs.read(2)
    assert not logs.read(3)
    logs.close()


def test_log_of_a_run_has_no_headings(tmp_path: Path) -> None:
    logs = OutputLogs(tmp_path)
    logs.take(text(0, 1, "first\n"))
    assert logs.read(0) == "first\n"
    logs.close()


def test_received_text_is_in_the_file_when_no_record_waits(tmp_path: Path) -> None:
    logs = OutputLogs(tmp_path)
    with Receiver() as receiver:
        receiver.subscribers.add(logs.take)
        receiver.on_idle = logs.flush
        reporter = reporter_of(0, receiver.bound_socket.address)
        for word in ("one ", "two ", "three"):
            reporter.send(text(0, 1, word))
        written = logs.path(0)
        assert repeat_until(
            lambda: written.exists() and written.read_text() == "one two three", LIMIT_S
        )
        reporter.close()
    logs.close()
