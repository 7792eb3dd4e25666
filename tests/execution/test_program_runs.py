"""Storage of the runs of a program, with records in any order of their arrival."""

from __future__ import annotations

import io
import os
import queue
import struct
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.cells.options import cell_options
from nbdist.cells.parse import parse_cell
from nbdist.execution import program_runs
from nbdist.execution.program_runs import ProgramRuns
from nbdist.execution.saved_runs import runs as stored
from nbdist.records import CellEnded, Failure, Metrics, Output, ProgramCell, WorkerState
from nbdist.settings import Settings
from nbdist.telemetry import run_reader

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import AnyEvent


def cell(number: int, ranks: int = 2) -> ProgramCell:
    request = parse_cell(
        "job.report(loss=1)", cell_options({}), number=number, label=number, strategy="pjrt"
    )
    workers = tuple(
        WorkerState(rank=rank, host=f"h{rank}", pid=7 + rank, versions={}, devices=())
        for rank in range(ranks)
    )
    return ProgramCell(
        request=request,
        header="job.run(train_loop)",
        program="train.py",
        source="the program",
        workers=workers,
        seed=3,
    )


def report(number: int, rank: int, value: float) -> Metrics:
    return Metrics(rank=rank, cell=number, epoch=1, step=-1, time_s=value, own={"loss": value})


def end(number: int, rank: int, failure: Failure | None = None) -> CellEnded:
    status = "ok" if failure is None else "error"
    return CellEnded(rank=rank, cell=number, status=status, seconds=1.0, failure=failure)


def store(tmp_path: Path, *items: AnyEvent | ProgramCell | None) -> ProgramRuns:
    runs = ProgramRuns(Settings(runs_folder=str(tmp_path)))
    for item in items:
        runs.take(item)
        runs.tick()
    return runs


def test_records_before_their_cell_and_after_the_next_are_stored(tmp_path: Path) -> None:
    runs = store(
        tmp_path,
        report(1, 1, 2.0),  # rank 1 is ahead of rank 0
        end(1, 1),
        cell(1),
        report(1, 0, 4.0),
        cell(2),
        report(2, 1, 8.0),
        end(2, 1),
        end(1, 0),
        report(2, 0, 6.0),
        end(2, 0),
        report(1, 0, 9.0),  # after the end of its run
        None,
    )
    assert runs.is_over()
    second, first = stored(tmp_path)
    assert [first.loss.tolist(), second.loss.tolist()] == [[3.0], [7.0]]
    assert {first.state.status, second.state.status} == {"finished"}
    assert (first.state.seed, first.state.header) == (3, "job.run(train_loop)")


def test_a_run_waits_for_its_ranks_only_a_short_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_runs, "_LAST_RECORDS_S", 0.0)
    failure = Failure(ename="ValueError", evalue="no day", traceback=(), same="")
    store(tmp_path, cell(1, 3), report(1, 0, 1.0), end(1, 1, failure), None)
    (run,) = stored(tmp_path)
    assert (run.state.status, run.state.error) == ("failed", "ValueError on rank 1@h1: no day")
    assert [worker.status for worker in run.state.workers] == ["dead", "failed", "dead"]


def test_dropped_text_of_a_rank_ahead_of_rank_0_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_runs, "_MOST_EARLY", 2)

    def text(rank: int, written: str) -> Output:
        return Output(rank=rank, cell=1, stream="stdout", text=written)

    early = [
        report(1, 1, 2.0),
        *(text(1, f"line {line}\n") for line in range(3)),
        text(2, "größer"),
    ]
    store(tmp_path, *early, cell(1, 3), text(1, "later\n"), *(end(1, rank) for rank in range(3)))
    (run,) = stored(tmp_path)
    assert run.output(1) == (
        "line 0\n\n[nbdist: 14 characters of the output were not stored]\nlater\n"
    )
    assert run.output(2) == "\n[nbdist: 6 characters of the output were not stored]\n"


def test_a_withdrawn_stop_leaves_the_run_running(tmp_path: Path) -> None:
    runs = store(tmp_path, cell(1), report(1, 0, 2.0))
    (run,) = run_reader.stored_runs(tmp_path)
    assert [run.state().status] == ["running"]
    run.ask_to_stop()
    runs.tick()
    assert run.state().status == "stopping"
    run.withdraw_stop()
    runs.tick()
    assert run.state().status == "running"
    run.withdraw_stop()  # there is no request
    runs.take(end(1, 0))
    runs.take(end(1, 1))
    runs.tick()
    assert run.state().status == "finished"


def test_cells_are_read_until_rank_0_closes_the_stream() -> None:
    frames = [msgspec.msgpack.encode(cell(number)) for number in (1, 2)]
    whole = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    for cut in (0, 3):  # rank 0 may die while it writes
        items: queue.SimpleQueue[AnyEvent | ProgramCell | None] = queue.SimpleQueue()
        program_runs._read(io.BytesIO(whole[: len(whole) - cut]), items)
        found = []
        while (item := items.get_nowait()) is not None:
            found.append(item)
        assert found == [cell(1), cell(2)][: 2 if cut == 0 else 1]


def test_the_writer_shows_other_hosts_that_it_runs(tmp_path: Path) -> None:
    runs = store(tmp_path, cell(1), report(1, 0, 2.0))
    (run,) = stored(tmp_path)
    path = tmp_path / run.id / "run.json"
    before = path.read_bytes()
    os.utime(path, (0, 0))
    later = time.monotonic() + 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        runs.tick()
    assert path.stat().st_mtime > 0
    assert path.read_bytes() == before
    runs.take(end(1, 0))
    runs.take(end(1, 1))
    runs.tick()
