"""Runs that another process continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.execution.resume import reopen
from nbdist.records import (
    CellOptions,
    CellRequest,
    Columns,
    Output,
    Rows,
    RunningCell,
    SocketAddress,
    StepBegun,
    SystemSample,
)
from nbdist.settings import Settings
from nbdist.telemetry.receiver import Receiver, Repeats
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.reporter import Reporter
from nbdist.worker.runtime.row_buffer import RowBuffer
from tests.runs import loss, losses, new_run, read, reports, rows, send
from tests.telemetry.test_receiver import Collected

if TYPE_CHECKING:
    from pathlib import Path


def running_cell(root: Path, run: str) -> RunningCell:
    options = CellOptions(detach=True, max_heals=0)
    request = CellRequest(
        number=1, source="", label=3, strategy="mirrored", awaits=False, options=options
    )
    return RunningCell(request=request, ranks=(0, 1), run=run, runs=str(root))


def test_repeated_rows_of_each_rank_are_removed() -> None:
    repeats = Repeats()
    assert repeats.fresh(losses(1, 3)) == losses(1, 3)
    assert repeats.fresh(losses(1, 3)) is None
    assert repeats.fresh(losses(2, 5)) == losses(4, 5)
    assert repeats.fresh(losses(1, 2, rank=1)) == losses(1, 2, rank=1)
    epoch = loss(2)  # ranks report an epoch after the rows of later steps
    assert repeats.fresh(epoch) == epoch
    assert repeats.fresh(epoch) is None
    text = Output(rank=0, cell=1, stream="stdout", text="again")
    assert [repeats.fresh(text), repeats.fresh(text)] == [text, text]


def test_samples_of_the_host_are_no_reports(tmp_path: Path) -> None:
    run = new_run(tmp_path, replicas=0)
    run.take(SystemSample(rank=1, cell=1, time_s=2.0, values={"cpu_cores": 1.0}))
    run.close()
    resumed = reopen(running_cell(tmp_path, run.state.id), Settings())
    assert resumed.reports == ()
    resumed.live.close()
    assert not run.path.exists()


def test_stored_rows_count_as_received(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for record in (losses(1, 4), losses(1, 3, rank=1)):
        run.take(record)
    run.close()
    resumed = reopen(running_cell(tmp_path, run.state.id), Settings())
    assert isinstance(resumed.begun, StepBegun)
    repeats = Repeats(resumed.reports)
    assert repeats.fresh(losses(2, 4)) is None
    assert repeats.fresh(losses(2, 4, rank=1)) == losses(4, 4, rank=1)
    resumed.live.leave()


def test_a_resumed_run_continues_after_the_last_whole_row(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 3))
    run.close()
    (table,) = (run.path / "tables").glob("*.f64")
    with table.open("ab") as file:
        file.write(b"cut")  # the process was killed during a write
    live = reopen(running_cell(tmp_path, run.state.id), Settings()).live
    send(live, losses(4, 6))
    send(live, rows([[0, 1, 1, 0.1, 7.0]], Columns(own=("other",))))
    live.end("finished")
    live.close()
    first, second = reports(read(run))
    np.testing.assert_array_equal(first[:, 2], [1, 2, 3, 4, 5, 6])
    assert second[0, -1] == 7.0
    assert read(run).state().status == "finished"


def test_a_deleted_run_is_reported_as_not_stored(tmp_path: Path) -> None:
    resumed = reopen(running_cell(tmp_path, "20260101-000000-abcdef"), Settings())
    send(resumed.live, losses(1, 2))
    (message,) = resumed.live.end("finished")
    assert "no longer stored" in message


def test_unsent_rows_are_sent_again_to_a_new_receiver() -> None:
    """No row is lost.

    The second receiver gets some rows that the first one has already received.
    """
    columns = Columns(measures=("step_s",), own=("loss",))
    first = Collected(1)
    receiver = Receiver()
    receiver.subscribers.add(first)
    receiver.start()
    probe = Reporter(receiver.bound_socket.address, RowBuffer(0, MemoryGauge()))
    probe.report(1, columns, (1, 1, 0.1, 0.1, 1.0))
    first.wait()
    receiver.close()
    probe.report(1, columns, (1, 2, 0.2, 0.1, 2.0))
    second = Collected(2)
    again = Receiver(receiver.bound_socket)
    again.subscribers.add(second)
    with again:
        assert again.bound_socket.address == SocketAddress(
            url=f"tcp://127.0.0.1:{receiver.bound_socket.port}",
            server_key=receiver.bound_socket.public_key,
        )
        second.wait()
        probe.close()
    resent = [r for r in second.records if isinstance(r, Rows) and r.columns == columns]
    steps = [m.step for r in resent for m in r.unpacked()]
    assert steps == [1, 2]
