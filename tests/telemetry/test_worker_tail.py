"""Messages about one worker of a run."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.records import CaughtUp, Output, StackMessage, StateMessage, TextMessage
from nbdist.records.runs import AnyServerMessage
from nbdist.telemetry import worker_tail
from nbdist.telemetry.output_logs import LOG_FOLDER, OutputLogs
from nbdist.telemetry.worker_tail import ClusterLogTail, WorkerTail
from tests.runs import new_run, read
from tests.telemetry.test_stacks import position

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.telemetry.run_writer import RunDirectory


def news(tail: WorkerTail | ClusterLogTail) -> list[AnyServerMessage]:
    return [msgspec.json.decode(message, type=AnyServerMessage) for message in tail.news()]


def write(run: RunDirectory, text: str, rank: int = 1) -> None:
    run.take(Output(rank=rank, cell=1, stream="stdout", text=text))
    run.flush()


def test_text_and_stack_of_one_worker_are_sent_as_they_come(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with contextlib.closing(WorkerTail(read(run), 1)) as tail:
        assert news(tail) == [StateMessage(state=run.state), CaughtUp()]
        write(run, "größer\n")
        write(run, "another worker\n", rank=0)
        assert news(tail) == [TextMessage(text="größer\n")]
        run.take(position())
        stack = read(run).stack(1)
        assert stack is not None
        assert news(tail) == [StackMessage(stack=stack)]
        assert news(tail) == []
        write(run, "more\n")
        assert news(tail) == [TextMessage(text="more\n")]
    run.close()


def test_beginning_of_a_long_text_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_tail, "LOG_BYTES", 12)
    run = new_run(tmp_path)
    write(run, "first\nsecond\nthird\nlast\n")
    with contextlib.closing(WorkerTail(read(run), 1)) as tail:
        _, omission, text, _ = news(tail)
    assert omission == TextMessage(text="[13 bytes are left out: %dist_logs shows all text]\n")
    assert text == TextMessage(text="third\nlast\n")
    run.close()


def test_text_of_all_cells_of_a_cluster_is_sent_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "cluster" / LOG_FOLDER).mkdir(parents=True)
    logs = OutputLogs(tmp_path / "cluster" / LOG_FOLDER)
    with contextlib.closing(ClusterLogTail(tmp_path / "cluster", 1)) as tail:
        assert news(tail) == [CaughtUp()]
        for cell in (1, 2):
            logs.begin(cell, f"Cell {cell}")
            logs.take(Output(rank=1, cell=cell, stream="stdout", text=f"{cell}\n"))
            logs.take(Output(rank=0, cell=cell, stream="stdout", text="another worker\n"))
        logs.flush()
        assert news(tail) == [TextMessage(text="── Cell 1 ──\n1\n\n── Cell 2 ──\n2\n")]
        logs.take(Output(rank=1, cell=2, stream="stdout", text="last\n"))
        logs.close()
        shutil.rmtree(tmp_path / "cluster")
        with pytest.raises(FileNotFoundError):
            news(tail)
        last = [msgspec.json.decode(m, type=AnyServerMessage) for m in tail.last()]
        assert last == [TextMessage(text="last\n")]
