"""Messages about one worker of a run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import CaughtUp, Output, StackMessage, StateMessage, TextMessage
from nbdist.records.runs import AnyServerMessage
from nbdist.telemetry import worker_tail
from nbdist.telemetry.worker_tail import WorkerTail
from tests.runs import new_run, read
from tests.telemetry.test_stacks import position

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from nbdist.telemetry.run_writer import RunDirectory


def news(tail: WorkerTail) -> list[AnyServerMessage]:
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
