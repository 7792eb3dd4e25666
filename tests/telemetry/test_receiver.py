from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from nbdist.records import AnyEvent, Columns, Output, Rows, SocketAddress
from nbdist.telemetry.output_logs import OutputLogs
from nbdist.telemetry.receiver import CellStream, Receiver, Repeats
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.reporter import PENDING_LIMIT_BYTES, Reporter
from nbdist.worker.runtime.row_buffer import ROOM_ROWS, RowBuffer
from tests.runs import losses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORKERS, RECORDS = 16, 2000


class Collected:
    """Collects records and notices when the expected number has arrived."""

    def __init__(self, expected: int) -> None:
        self.records: list[AnyEvent] = []
        self._expected = expected
        self._all = threading.Event()

    def __call__(self, record: AnyEvent) -> None:
        self.records.append(record)
        if len(self.records) >= self._expected:
            self._all.set()

    def wait(self) -> None:
        assert self._all.wait(30), f"{len(self.records)} of {self._expected} arrived"


def reporter_of(rank: int, address: SocketAddress) -> Reporter:
    return Reporter(address, RowBuffer(rank, MemoryGauge()))


@contextlib.contextmanager
def receiving(collected: Collected) -> Iterator[Receiver]:
    with Receiver() as receiver:
        receiver.subscribers.add(collected)
        yield receiver


def text(rank: int, number: int) -> Output:
    return Output(rank=rank, cell=1, stream="stdout", text=f"{number}\n")


def test_every_record_arrives_in_each_ranks_order() -> None:
    collected = Collected(WORKERS * RECORDS)
    with receiving(collected) as receiver:
        reporters = [reporter_of(rank, receiver.bound_socket.address) for rank in range(WORKERS)]
        for number in range(RECORDS):
            for rank, reporter in enumerate(reporters):
                reporter.send(text(rank, number))
        collected.wait()
        for reporter in reporters:
            reporter.close()
    for rank in range(WORKERS):
        own = [r.text for r in collected.records if isinstance(r, Output) and r.rank == rank]
        assert own == [f"{number}\n" for number in range(RECORDS)]


EXITS_AFTER_SENDING = """
import os, sys
import msgspec
from nbdist.records import Output, SocketAddress
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.reporter import Reporter
from nbdist.worker.runtime.row_buffer import RowBuffer
probe = Reporter(msgspec.json.decode(sys.argv[1], type=SocketAddress), RowBuffer(0, MemoryGauge()))
for number in range(40):
    probe.send(Output(rank=0, cell=1, stream="stdout", text=f"{number}" + 100_000 * " "))
probe.close()
os._exit(0)
"""


@pytest.mark.processes
def test_last_records_of_an_ended_process_arrive() -> None:
    """ZeroMQ sends in its own thread, which ends with the process."""
    collected = Collected(40)
    with receiving(collected) as receiver:
        address = msgspec.json.encode(receiver.bound_socket.address).decode()
        subprocess.run([sys.executable, "-c", EXITS_AFTER_SENDING, address], check=True, timeout=60)
        collected.wait()


def test_records_without_the_key_are_dropped() -> None:
    collected = Collected(1)
    with receiving(collected) as receiver:
        wrong, _ = zmq.curve_keypair()
        strangers = [
            zmq.Context.instance().socket(zmq.PUSH),
            zmq.Context.instance().socket(zmq.PUSH),
        ]
        strangers[1].curve_publickey, strangers[1].curve_secretkey = zmq.curve_keypair()
        strangers[1].curve_serverkey = wrong
        for stranger in strangers:
            stranger.connect(receiver.bound_socket.address.url)
            stranger.send(msgspec.msgpack.encode(text(9, 9)))
        known = reporter_of(0, receiver.bound_socket.address)
        known.send(text(0, 0))
        collected.wait()
        known.close()
        for stranger in strangers:
            stranger.close(linger=0)
    assert [r.rank for r in collected.records] == [0]


def test_invalid_records_are_dropped_and_others_arrive() -> None:
    collected = Collected(1)
    with receiving(collected) as receiver:
        public, secret = zmq.curve_keypair()
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_serverkey = receiver.bound_socket.address.server_key
        socket.connect(receiver.bound_socket.address.url)
        socket.send_multipart([b"\xc1 no record", msgspec.msgpack.encode(text(3, 0))])
        collected.wait()
        socket.close()
    assert [r.rank for r in collected.records] == [3]


def test_subscribers_of_a_cell_get_each_record_once_until_its_end() -> None:
    everything, of_cell = list[AnyEvent](), list[AnyEvent]()

    def fails(record: AnyEvent) -> None:
        raise OSError("disk is full")

    receiver = Receiver()
    stream = CellStream(receiver, 1, Repeats([losses(1, 3)]))
    stream.subscribers.add(fails, of_cell.append)
    receiver.subscribers.add(everything.append)
    other = text(0, 1)
    records = [losses(2, 5), text(1, 2), msgspec.structs.replace(other, cell=2)]
    for record in records:
        receiver.subscribers.deliver(record)
    stream.close()
    receiver.subscribers.deliver(other)
    receiver.close()
    assert of_cell == [losses(4, 5), text(1, 2)]
    assert everything == [*records, other]


def test_a_writer_waits_if_nobody_reads() -> None:
    """Without a receiver, `send` blocks instead of dropping text."""
    public, _ = zmq.curve_keypair()
    reporter = reporter_of(0, SocketAddress(url="tcp://127.0.0.1:1", server_key=public))
    big = Output(rank=0, cell=1, stream="stdout", text="x" * PENDING_LIMIT_BYTES)
    finished = threading.Event()

    def write() -> None:
        for _ in range(3):
            reporter.send(big)
        finished.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert not finished.wait(1)
    reporter.close()
    assert finished.wait(10), "closing the reporter releases writers"
    writer.join()


def test_logs_keep_the_text_of_each_rank(tmp_path: Path) -> None:
    logs = OutputLogs(tmp_path)
    for number in range(1000):
        for rank in range(2):
            logs.take(text(rank, number))
    assert logs.read(1) == "".join(f"{number}\n" for number in range(1000))
    assert logs.read(5) == ""
    logs.close()
    logs.take(text(1, 1000))  # from a thread that ends after the logs
    logs.take(text(3, 1000))
    assert logs.read(1).endswith("\n999\n")
    assert not logs.path(3).exists()


def test_rows_arrive_in_batches_and_with_memory() -> None:
    collected = Collected(2)
    columns = Columns(measures=("step_s",), own=("loss",))
    with receiving(collected) as receiver:
        reporter = reporter_of(3, receiver.bound_socket.address)
        for step in range(1, 101):
            reporter.report(7, columns, (1, step, 0.1 * step, 0.1, 1 / step))
        collected.wait()
        reporter.close()
    rows = [r for r in collected.records if isinstance(r, Rows)]
    reported = [m for r in rows if r.columns == columns for m in r.unpacked()]
    assert [m.step for m in reported] == list(range(1, 101))
    assert reported[-1].own == {"loss": 0.01}
    assert {(m.rank, m.cell, m.epoch) for m in reported} == {(3, 7, 1)}
    memory = next(r for r in rows if r.columns.measures == ("process_bytes",))
    values = struct.unpack("<5d", memory.values)
    assert values[0] == 3
    assert values[4] > 1e6


def test_memory_of_the_fullest_device_is_reported() -> None:
    gauge = MemoryGauge()
    gauge.device_bytes = lambda: [3, 5]
    assert gauge.read()["device_bytes"] == 5


def test_rows_beyond_the_buffer_are_counted_without_waiting() -> None:
    row_buffer = RowBuffer(0, MemoryGauge())
    columns = Columns(own=("loss",))
    for step in range(ROOM_ROWS + 5):
        row_buffer.add(1, columns, (-1, step, 0.0, 1.0))
    row_buffer.add(1, Columns(own=("late",)), (-1, 1, 0.0, 1.0))
    row_buffer.add(1, Columns(measures=("report_s",)), (-1, 1, 0.0, 1.0))  # not a report
    kept, late, measured, memory = row_buffer.take()
    assert (measured.dropped, measured.values) == (0, b"")
    assert (kept.dropped, len(kept.values)) == (5, ROOM_ROWS * 5 * 8)
    assert (late.dropped, late.values) == (1, b"")
    assert memory.columns.measures == ("process_bytes",)
    assert not row_buffer
