"""Result of a cell, from the reports of its ranks."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.execution.result import Run, Summary
from nbdist.records import Columns, Metrics, Note, RecoveryRecord, StepBegun
from tests.runs import losses, recover, rows

BEGUN = StepBegun(
    rank=0, cell=1, replicas=2, batch=32, samples=64, epochs=1, steps=2, sharding="", rates=()
)


def report(rank: int, epoch: int, shared: dict[str, float] | None = None, **own: float) -> Metrics:
    return Metrics(
        rank=rank, cell=1, epoch=epoch, step=-1, time_s=float(epoch), own=own, shared=shared or {}
    )


def note(text: str, topic: str = "compiled", *, warning: bool = False) -> Note:
    return Note(rank=0, cell=1, topic=topic, text=text, warning=warning)  # type: ignore[arg-type]


def test_loss_is_the_first_metric() -> None:
    run = Run(1, (report(0, 1, accuracy=0.5, loss=1.0, other=2.0),))
    assert run.names == ("loss", "accuracy", "other")


def test_metrics_contain_all_rows() -> None:
    run = Run(1, (losses(1, 2), report(1, 1, loss=3.0)))
    assert [(m.rank, m.own["loss"]) for m in run.metrics] == [(0, 1.0), (0, 2.0), (1, 3.0)]


def test_recoveries_supersede_metrics_of_repeated_steps() -> None:
    first, again = losses(1, 4), losses(3, 4, lost_s=5.0)
    run = Run(1, (first, again), recoveries=(recover(died=4, step=2, time_s=1.0),))
    assert [(m.step, m.time_s > 1) for m in run.metrics] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
    ]
    assert run.reports == (first, again)


def test_the_last_value_is_the_mean_of_the_ranks() -> None:
    reports = (report(0, 1, loss=9.0), report(1, 1, loss=2.0), report(0, 2, loss=4.0))
    run = Run(1, (*reports, report(1, 2, other=1.0)))
    assert run.last("loss") == 3.0
    assert run.last("other") == 1.0


def test_the_last_reduced_value_is_that_of_any_rank() -> None:
    run = Run(1, (report(0, 1, {"loss": 1.0}), report(0, 2, {"loss": 5.0})))
    assert run.last("loss") == 5.0
    packed = rows([[0, 1, 1, 0.1, 7.0], [0, 1, 2, 0.2, 8.0]], Columns(shared=("loss",)))
    assert Run(1, (packed,)).last("loss") == 8.0


def test_a_recovery_removes_the_last_value_of_a_rank() -> None:
    """Without the recovery, the last report of rank 0 would be superseded."""
    late = (losses(1, 4), losses(1, 2, rank=1))
    recovery = recover(died=4, step=2, time_s=1.0)
    assert Run(1, late).last("loss") == pytest.approx((4.0 + 2.1) / 2)
    assert Run(1, late, recoveries=(recovery,)).last("loss") == pytest.approx((2.0 + 2.1) / 2)


@pytest.mark.parametrize("method", ["last", "table"])
def test_an_unreported_metric_names_the_reported_ones(method: str) -> None:
    with pytest.raises(KeyError, match="'acc' was not reported; reported metrics: loss, x"):
        getattr(Run(1, (report(0, 1, x=1.0, loss=2.0),)), method)("acc")
    with pytest.raises(KeyError, match="reported metrics: none"):
        getattr(Run(1), method)("acc")


def test_the_loss_is_the_mean_of_the_ranks_by_step() -> None:
    run = Run(1, (losses(1, 3), losses(1, 3, rank=1)))
    np.testing.assert_allclose(run.loss, [1.05, 2.05, 3.05])
    with pytest.raises(KeyError, match="'loss' was not reported"):
        _ = Run(1, (report(0, 1, x=1.0),)).loss


def test_a_missing_loss_is_nan_unless_a_recovery_left_out_its_rank() -> None:
    reports = (losses(1, 2), losses(1, 1, rank=1))
    np.testing.assert_allclose(Run(1, reports).loss, [1.05, np.nan])
    whole = RecoveryRecord(time_s=0.15, ranks=(1,), reason="", step=1, lost_s=1.0)
    np.testing.assert_allclose(Run(1, reports, recoveries=(whole,)).loss, [1.05, np.nan])
    fewer = RecoveryRecord(time_s=0.15, ranks=(1,), reason="", step=1, lost_s=1.0, workers=1)
    np.testing.assert_allclose(Run(1, reports, recoveries=(fewer,)).loss, [1.05, 2.0])


def test_a_table_shows_ranks_and_epochs() -> None:
    table = Run(1, (report(0, 1, loss=0.5), report(1, 1, loss=0.25))).table()
    assert repr(table).splitlines() == [
        "loss by rank",
        "rank  epoch 1",
        "----  -------",
        "   0   0.5000",
        "   1   0.2500",
    ]


def test_a_summary_counts_ranks_steps_and_compilations() -> None:
    notes = (
        note("compiled for 8 rows"),
        note("compiled for 8 rows"),  # of another rank
        note("compiled for 3 rows"),
        note("compiled often", warning=True),
        note("slow", "batch"),
    )
    reports = (losses(1, 3), losses(1, 3, rank=1))
    run = Run(1, reports, {5: "7"}, BEGUN, notes=notes, recoveries=(recover(9, 9, 0.0),))
    summary = run.summary
    assert (summary.ranks, summary.epochs, summary.steps) == (3, 1, 3)
    assert (summary.replicas, summary.batch, summary.compilations) == (2, 32, 3)
    assert summary.recoveries == 1
    assert summary.seconds == pytest.approx(0.3)
    assert summary.step_s == pytest.approx(0.1)
    assert summary.last == {"loss": pytest.approx(3.05)}


def test_a_summary_of_a_plain_cell_has_no_step() -> None:
    summary = Run(1, results={0: "1", 2: "1"}, notes=(note("compiled for 8 rows"),)).summary
    assert (summary.ranks, summary.steps, summary.step_s) == (2, 0, 0.0)
    assert (summary.replicas, summary.batch, summary.compilations) == (0, 0, 0)
    assert repr(summary) == "2 ranks, 0 s"


def test_a_summary_in_words() -> None:
    one = Summary(1, 1, 2, 3.14, 0.01234, 1, 8, 1, 2, {"loss": 0.123456, "acc": 1.0})
    assert repr(one) == (
        "1 rank, 8 samples a batch on 1 replica, 1 epoch, 2 steps, 12.3 ms a step, 3.14 s, "
        "recovered 2 times, loss 0.1235, acc 1"
    )
    assert repr(Run(4)) == "<nbdist run 4: 0 ranks, 0 s>"


def test_a_result_without_values_has_no_chart() -> None:
    data = Run(4)._repr_mimebundle_()
    assert list(data) == ["text/plain"]


def test_a_data_frame_has_a_row_for_each_report() -> None:
    frame = Run(1, (losses(1, 2), losses(1, 1, rank=1))).to_dataframe()
    assert list(frame.columns) == ["rank", "epoch", "step", "time_s", "loss"]
    assert sorted(frame["loss"]) == [1.0, 1.1, 2.0]


def test_a_copy_in_another_process_has_no_workers() -> None:
    """A run refers to its cluster, whose threads and sockets cannot be pickled."""
    run = Run(1, evaluate=lambda _code: threading.Lock())
    copy = pickle.loads(pickle.dumps(run))
    assert copy == run
    with pytest.raises(UsageError, match="has no workers"):
        copy.export("model", "out")
