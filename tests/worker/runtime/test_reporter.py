"""Thread that sends the records of a rank: texts that UTF-8 lacks, and a restarted notebook."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from nbdist.records import CellEnded, Columns, Display, Metrics, Output, Rows
from nbdist.telemetry.receiver import Receiver
from nbdist.utils.polling import repeat_until
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.reporter import (
    BATCH_INTERVAL_S,
    LONGEST_INTERVAL_S,
    PENDING_LIMIT_BYTES,
    Reporter,
    batch_interval,
)
from nbdist.worker.runtime.row_buffer import RowBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import AnyEvent, BoundSocket

WAIT_S = 10.0


class Notebook:
    """Receiver of a notebook that collects records until the last one arrives."""

    def __init__(self, bound_socket: BoundSocket | None = None) -> None:
        self.receiver = Receiver(bound_socket)
        self.records: list[AnyEvent] = []
        self._has_last = threading.Event()
        self.receiver.subscribers.add(self._take)
        self.receiver.start()

    def _take(self, record: AnyEvent) -> None:
        if isinstance(record, Output) and record.text == "last":
            self._has_last.set()
        else:
            self.records.append(record)

    def received(self, reporter: Reporter) -> list[AnyEvent]:
        """Return all records so far."""
        reporter.send(text("last"))
        assert self._has_last.wait(WAIT_S)
        self._has_last.clear()
        found, self.records = self.records, []
        return found


class Line:
    """A notebook and the reporter of a rank."""

    def __init__(self) -> None:
        self.notebook = Notebook()
        address = self.notebook.receiver.bound_socket.address
        self.reporter = Reporter(address, RowBuffer(0, MemoryGauge()))

    def received(self) -> list[AnyEvent]:
        return self.notebook.received(self.reporter)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.reporter.close()
    made.notebook.receiver.close()


def text(content: str) -> Output:
    return Output(rank=0, cell=1, stream="stdout", text=content)


def display(data: Any) -> Display:
    return Display(rank=0, cell=1, data=data, metadata={})


def test_surrogates_become_question_marks(line: Line) -> None:
    line.reporter.send(text("a\udc80b"))
    line.reporter.send(display({"k\udc80": ["x\udc80", {"y": ("\udc80", 1, None)}]}))
    sent, shown = line.received()
    assert isinstance(sent, Output)
    assert sent.text == "a?b"
    assert isinstance(shown, Display)
    assert shown.data == {"k?": ["x?", {"y": ["?", 1, None]}]}


def test_bytes_beside_surrogates_stay_bytes(line: Line) -> None:
    line.reporter.send(display({"a": "\udc80", "b": b"\xff\x00"}))
    (shown,) = line.received()
    assert isinstance(shown, Display)
    assert shown.data["a"] == "?"
    assert shown.data["b"] == b"\xff\x00"


def test_subclass_of_text_is_sent_as_its_characters(line: Line) -> None:
    class Text(str):
        def __str__(self) -> str:
            return "other"

    for content in (Text("own"), Text("own\udc80")):
        line.reporter.send(text(content))
    assert [record.text for record in line.received() if isinstance(record, Output)] == [
        "own",
        "own?",
    ]


def test_object_that_cannot_be_sent_is_refused(line: Line) -> None:
    with pytest.raises(TypeError, match="complex cannot be sent to the notebook"):
        line.reporter.send(display({"a": 1j}))
    line.reporter.send(text("b"))
    assert line.received() == [text("b")]


def test_rows_precede_the_other_records_of_a_batch(line: Line) -> None:
    line.reporter.send(text("a"))
    line.reporter.report(1, Columns(own=("loss",)), (1, 1, 0.1, 2.0))
    kinds = [type(record) for record in line.received()]
    assert kinds.index(Rows) < kinds.index(Output)


def test_urgent_record_is_passed_on_before_the_call_returns(line: Line) -> None:
    line.reporter.send(text("a"), urgent=True)
    assert not line.reporter._pending
    assert line.received() == [text("a")]


def test_flush_passes_on_rows_and_records(line: Line) -> None:
    line.reporter.flush()
    line.reporter.report(1, Columns(own=("loss",)), (1, 1, 0.1, 2.0))
    line.reporter.flush()
    assert not line.reporter._row_buffer
    line.reporter.send(text("a"))
    line.reporter.flush()
    assert not line.reporter._pending


def test_flush_ends_when_zeromq_has_the_batch(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be killed after a flush, when it has written a checkpoint."""
    begun, may_send = threading.Event(), threading.Event()
    send = zmq.Socket.send_multipart

    def held(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        begun.set()
        may_send.wait(WAIT_S)
        send(socket, frames)

    monkeypatch.setattr(zmq.Socket, "send_multipart", held)
    line.reporter.report(1, Columns(own=("loss",)), (1, 1, 0.1, 2.0))
    flushing = threading.Thread(target=line.reporter.flush)
    flushing.start()
    assert begun.wait(WAIT_S)
    flushing.join(0.2)
    is_waiting = flushing.is_alive()
    may_send.set()
    flushing.join(WAIT_S)
    assert is_waiting
    assert not flushing.is_alive()
    assert any(isinstance(record, Rows) for record in line.received())


def test_restarted_notebook_gets_reports_again_but_no_text(line: Line) -> None:
    ended = CellEnded(rank=0, cell=1, status="ok", seconds=1.0)
    epoch = Metrics(rank=0, cell=1, epoch=1, step=-1, time_s=1.0, own={"loss": 2.0})
    for record in (text("a"), epoch, ended):
        line.reporter.send(record)
    assert line.received() == [text("a"), epoch, ended]
    line.notebook.receiver.close()
    line.notebook = Notebook(line.notebook.receiver.bound_socket)
    assert line.received() == [epoch, ended]
    assert line.received() == []


def test_program_drops_text_that_its_store_does_not_take() -> None:
    notebook = Notebook()
    bound = notebook.receiver.bound_socket
    notebook.receiver.close()
    reporter = Reporter(bound.address, RowBuffer(0, MemoryGauge()), waits=False)
    long = text("x" * (PENDING_LIMIT_BYTES // 2))
    for _ in range(3):
        reporter.send(long)
    reporter.send(text("größer"))
    notebook = Notebook(bound)
    assert repeat_until(lambda: not reporter._pending, WAIT_S)
    reporter.send(text("next"))
    count = PENDING_LIMIT_BYTES // 2 + len("größer")
    remark = f"\n[nbdist: {count} characters of the output were not stored]\nnext"
    assert notebook.received(reporter) == [long, long, text(remark)]
    reporter.close()
    notebook.receiver.close()


def test_ranks_of_large_clusters_send_less_often() -> None:
    assert batch_interval(1) == batch_interval(16) == BATCH_INTERVAL_S
    assert batch_interval(64) == pytest.approx(0.16)
    assert batch_interval(1000) == LONGEST_INTERVAL_S
