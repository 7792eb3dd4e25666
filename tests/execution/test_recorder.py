"""Rows of a training loop that arrive before the record of its beginning."""

from __future__ import annotations

from array import array

from nbdist.execution.recorder import Recorder
from nbdist.records import Columns, Rows, StepBegun


def rows(rank: int, step: int) -> Rows:
    columns = Columns(measures=("step_s",), shared=("loss",))
    place = [rank, 1, step, 0.1 * step]
    values = array("d", [*place, 0.1, 1.0 / step][: len(columns.names)])
    return Rows(rank=rank, cell=1, columns=columns, values=values.tobytes())


def begun(rank: int) -> StepBegun:
    return StepBegun(
        *(2, 8, -1, 0, -1, "by element", ()),
        rank=rank,
        cell=1,
    )


def test_rows_before_the_beginning_of_a_loop_are_in_the_history() -> None:
    recorder = Recorder(1, is_step=False)
    for record in (rows(0, 1), begun(0), rows(0, 2)):
        recorder.keep(record)
    assert [m.step for m in recorder.run().metrics] == [1, 2]


def test_batches_of_a_fit_are_not_in_the_history() -> None:
    recorder = Recorder(1, is_step=False)
    for step in range(1, 200):
        recorder.keep(rows(0, step))
    assert recorder.run().metrics == ()
