"""Records of one rank, as the notebook receives them."""

from __future__ import annotations

import contextlib
import math
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import (
    Compiled,
    FitBegun,
    Metrics,
    Note,
    Rows,
    SocketAddress,
    StepBegun,
    WorkerIdentity,
)
from nbdist.telemetry.receiver import Receiver
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.rank_reporter import RankReporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import AnyEvent, Columns

WAIT_S = 10.0
LAST = "last record of the test"
FIT = FitBegun(rank=2, cell=7, epochs=1, steps=2, sharding="")
STEPS = StepBegun(
    rank=2,
    cell=7,
    replicas=1,
    batch=0,
    samples=-1,
    epochs=1,
    steps=2,
    sharding="",
    rates=(),
)


class Shield:
    """Context that counts its uses."""

    def __init__(self) -> None:
        self.uses = 0

    def __enter__(self) -> None:
        self.uses += 1

    def __exit__(self, *_: object) -> None: ...


class Notebook:
    """A receiver of records, with a rank that reports to it."""

    def __init__(self, *, telemetry: bool = True) -> None:
        self._receiver = Receiver()
        self._records: list[AnyEvent] = []
        self._receiver.subscribers.add(self._records.append)
        self._receiver.start()
        address = self._receiver.bound_socket.address
        identity = WorkerIdentity(
            rank=2, world_size=4, stream=address, dispatch=address, telemetry=telemetry
        )
        self.shield = Shield()
        self.identity = identity
        self.reporter = RankReporter(identity, MemoryGauge(), self.shield)
        self.reporter.begin_cell(7, 0.0)

    def received(self) -> list[AnyEvent]:
        """Return all records so far, except rows of the memory."""
        self.reporter.note("batch", LAST)
        deadline = time.monotonic() + WAIT_S
        while not any(isinstance(r, Note) and r.text == LAST for r in self._records):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        kept = [r for r in self._records if not is_memory(r)]
        self._records.clear()
        return [r for r in kept if not (isinstance(r, Note) and r.text == LAST)]

    def close(self) -> None:
        self.reporter.close()
        self._receiver.close()


def is_memory(record: AnyEvent) -> bool:
    return isinstance(record, Rows) and "process_bytes" in record.columns.measures


def intervals(records: list[AnyEvent]) -> list[tuple[int, int, float]]:
    """Return cell, step and seconds of the measured times between reports."""
    rows = [r for r in records if isinstance(r, Rows) and r.columns.measures == ("report_s",)]
    found = [
        (r.cell, struct.unpack("<5d", r.values[at : at + 40]))
        for r in rows
        for at in range(0, len(r.values), 40)
    ]
    return [(cell, int(row[2]), row[4]) for cell, row in found]


def metrics_of(rows: Rows) -> list[Metrics]:
    return [m for m in rows.unpacked() if m.own or m.shared]


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[Notebook]:
    notebook = Notebook(**options)
    try:
        yield notebook
    finally:
        notebook.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Notebook]:
    with opened() as notebook:
        yield notebook


@pytest.fixture
def notebook(shared: Notebook) -> Notebook:
    shared.reporter.begin_cell(7, 0.0)
    return shared


def test_records_contain_rank_and_cell(notebook: Notebook) -> None:
    notebook.reporter.note("batch", "first", warning=True)
    notebook.reporter.cell = 8
    notebook.reporter.note("batch", "second")
    notes = [r for r in notebook.received() if isinstance(r, Note)]
    assert [(n.rank, n.cell, n.text, n.warning) for n in notes] == [
        (2, 7, "first", True),
        (2, 8, "second", False),
    ]


def test_line_is_noted_once_in_each_cell(notebook: Notebook) -> None:
    for text in ("a", "b", "a"):
        notebook.reporter.note_once("batch", text)
    notebook.reporter.begin_cell(8, 0.0)
    notebook.reporter.note_once("batch", "a")
    notes = [r for r in notebook.received() if isinstance(r, Note)]
    assert [(n.cell, n.text) for n in notes] == [(7, "a"), (7, "b"), (8, "a")]


def test_reports_without_a_step_are_counted_in_each_cell(notebook: Notebook) -> None:
    notebook.reporter.report(loss=1)
    notebook.reporter.report(loss=2)
    notebook.reporter.begin_cell(8, 0.0)
    notebook.reporter.report(loss=3)
    rows = [r for r in notebook.received() if isinstance(r, Rows)]
    found = [(m.cell, m.epoch, m.step, m.own) for r in rows for m in metrics_of(r)]
    assert found == [
        (7, -1, 1, {"loss": 1.0}),
        (7, -1, 2, {"loss": 2.0}),
        (8, -1, 1, {"loss": 3.0}),
    ]


def test_report_of_an_epoch_has_no_step_and_is_not_counted(notebook: Notebook) -> None:
    notebook.reporter.report(epoch=3, loss=1.5)
    notebook.reporter.report(epoch=3, step=9, loss=2.5)
    notebook.reporter.report(loss=3.5)
    records = notebook.received()
    (epoch,) = [r for r in records if isinstance(r, Metrics)]
    assert (epoch.epoch, epoch.step, epoch.own, epoch.shared) == (3, -1, {"loss": 1.5}, {})
    steps = [m for r in records if isinstance(r, Rows) for m in metrics_of(r)]
    assert [(m.epoch, m.step, m.own["loss"]) for m in steps] == [(3, 9, 2.5), (-1, 2, 3.5)]


def test_time_between_reports_is_measured_from_the_second_step_of_a_cell_on(
    notebook: Notebook,
) -> None:
    reporter = notebook.reporter
    before = reporter.seconds()
    for step in (5, 10, 20):
        reporter.report(loss=1, step=step)
        reporter.report(accuracy=1, step=step)  # a second report of the same step
        reporter.report(epoch=step, loss=1)  # a report of an epoch
        reporter.report(step=step, text="a text")
    after = reporter.seconds()
    reporter.begin_cell(8, 0.0)
    reporter.report(loss=1)
    found = intervals(notebook.received())
    assert [(cell, step) for cell, step, _ in found] == [(7, 10), (7, 20)]
    assert all(seconds > 0 for *_, seconds in found)
    assert sum(seconds for *_, seconds in found) < after - before


@pytest.mark.parametrize("begun", [STEPS, FIT], ids=["steps", "fit"])
def test_time_between_reports_is_not_measured_beside_timed_steps(
    notebook: Notebook, begun: StepBegun | FitBegun
) -> None:
    notebook.reporter.send(begun)
    notebook.reporter.report(loss=1, step=1)
    notebook.reporter.report(loss=1, step=2)
    notebook.reporter.begin_cell(8, 0.0)
    notebook.reporter.report(loss=1, step=1)
    notebook.reporter.report(loss=1, step=2)
    assert [(cell, step) for cell, step, _ in intervals(notebook.received())] == [(8, 2)]


def test_values_are_separated_into_own_and_shared(notebook: Notebook) -> None:
    notebook.reporter.report_values(
        1, 5, own={"a": 1.0}, shared={"b": 2.0, "c": math.inf}, measured={"step_s": 0.25}
    )
    (rows,) = [r for r in notebook.received() if isinstance(r, Rows)]
    assert rows.columns.measures == ("step_s",)
    (found,) = metrics_of(rows)
    assert (found.own, found.shared) == ({"a": 1.0}, {"b": 2.0, "c": math.inf})


@pytest.mark.parametrize("value", ["x", None, [1, 2]])
def test_value_that_is_no_scalar_is_refused(notebook: Notebook, value: Any) -> None:
    with pytest.raises(TypeError, match=r"report\(loss=.*\): not a scalar"):
        notebook.reporter.report(loss=value)


def test_seconds_include_earlier_attempts(notebook: Notebook) -> None:
    notebook.reporter.begin_cell(8, 100.0)
    assert 100.0 <= notebook.reporter.seconds() < 100.0 + WAIT_S


def test_interrupts_are_deferred_while_a_record_is_queued(notebook: Notebook) -> None:
    before = notebook.shield.uses
    notebook.reporter.note("batch", "a")
    notebook.reporter.report(loss=1)
    notebook.reporter.flush()
    assert notebook.shield.uses == before + 3
    assert len(notebook.received()) == 2


def test_steps_are_not_reported_without_telemetry() -> None:
    with opened(telemetry=False) as notebook:
        notebook.reporter.report(step=0, loss=1)
        notebook.reporter.report(step=1, loss=1)
        notebook.reporter.report(epoch=1, loss=2)
        assert len(notebook.reporter.step_ends) == 2
        assert [type(r) for r in notebook.received()] == [Metrics]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reports_a_compilation(rank: int) -> None:
    sent: list[AnyEvent] = []

    class Collected:
        def send(self, record: AnyEvent, *, urgent: bool = False) -> None:
            del urgent
            sent.append(record)

        def report(self, cell: int, columns: Columns, row: tuple[float, ...]) -> None: ...

        def flush(self) -> None: ...

        def recent(self) -> list[bytes]:
            return []

        def close(self) -> None: ...

    address = SocketAddress(url="inproc://none", server_key=b"")
    identity = WorkerIdentity(rank=rank, world_size=2, stream=address, dispatch=address)
    reporter = RankReporter(identity, MemoryGauge(), contextlib.nullcontext(), Collected())
    reporter.begin_cell(3, 0.0)
    reporter.compiled(1, 2, 0.5)
    expected = Compiled(rank=0, cell=3, arguments=1, temporaries=2, seconds=0.5)
    assert sent == ([] if rank else [expected])


def test_values_of_a_lost_rank_are_repeated() -> None:
    with opened() as notebook, opened() as other:
        notebook.reporter.begin_cell(7, 0.0, run=7)
        notebook.reporter.note("batch", "not repeated")
        notebook.reporter.report(loss=1.5)
        notebook.reporter.report(epoch=1, loss=2.5)
        reports = notebook.reporter.recent()
        notebook.received()
        fresh = RankReporter(notebook.identity, MemoryGauge(), contextlib.nullcontext())
        try:
            for cell, run in ((8, 8), (9, 7)):  # the reports belong to run 7
                fresh.begin_cell(cell, 30.0, run)
                fresh.repeat(reports)
            fresh.report(loss=3.5)
            fresh.flush()
        finally:
            fresh.close()
        found = [r for r in notebook.received() if isinstance(r, Rows | Metrics)]
        values = [m for r in found for m in (metrics_of(r) if isinstance(r, Rows) else [r])]
        assert [(m.rank, m.cell, m.own["loss"]) for m in values] == [
            (2, 9, 1.5),
            (2, 9, 2.5),
            (2, 9, 3.5),
        ]
        other.reporter.begin_cell(9, 30.0, run=7)  # of another cluster
        other.reporter.repeat(reports)
        assert not other.received()
