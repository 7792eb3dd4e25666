from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.execution.recorder import Recorder
from nbdist.records import MEASURES, PLACE, Columns, Metrics
from nbdist.telemetry.history import Reports
from tests.runs import loss, losses, recover

reports = st.builds(
    Metrics,
    rank=st.integers(0, 3),
    cell=st.just(1),
    epoch=st.integers(-1, 2),
    step=st.sampled_from([-1, 0, 1, 3]),
    time_s=st.integers(0, 5).map(float),
    own=st.dictionaries(st.sampled_from("ab"), st.integers(0, 9).map(float)),
    shared=st.dictionaries(st.sampled_from("bc"), st.integers(0, 9).map(float)),
)


@given(st.lists(reports, max_size=12, unique_by=lambda m: (m.rank, m.epoch, m.step)))
def test_every_value_is_at_its_rank_and_step(metrics_list: list[Metrics]) -> None:
    of_steps = [m for m in metrics_list if m.step >= 0]
    chosen = of_steps or [m for m in metrics_list if m.epoch >= 0] or metrics_list
    ranks = sorted({m.rank for m in chosen})
    places = sorted({(max(m.step, 0), m.epoch, m.step) for m in chosen})
    history = Reports.of(metrics_list).history()
    assert set(history) == {name for m in chosen for name in (*m.own, *m.shared)}
    for name, values in history.items():
        assert values.shape == (len(ranks), len(places))
        expected = {
            (ranks.index(m.rank), places.index((max(m.step, 0), m.epoch, m.step))): value
            for m in chosen
            if (value := m.own.get(name, m.shared.get(name))) is not None
        }
        known = {tuple(place): values[tuple(place)] for place in np.argwhere(~np.isnan(values))}
        assert known == expected


def test_a_later_report_of_a_step_replaces_the_earlier_one() -> None:
    own = {"accuracy": 0.5, "loss": 5.0, "new": 1.0}
    later = Metrics(rank=0, cell=1, epoch=1, step=1, time_s=9.0, own=own)
    history = Reports.of([later, loss(1)]).history()
    np.testing.assert_array_equal(history["loss"], [[5]])
    assert list(history) == ["loss", "accuracy", "new"]


@pytest.mark.parametrize("count", range(len(MEASURES) + 1))
def test_measured_values_are_not_metrics(count: int) -> None:
    columns = Columns(measures=MEASURES[:count], own=("loss",), shared=("rate",))
    measured = [0.02] * count
    rows = np.array([[0, 1, 1, 0.1, *measured, 3, 4], [1, 1, 1, 0.1, *measured, 5, 4]])
    kept = Reports.of_tables([(columns, rows)])
    assert {name: values.tolist() for name, values in kept.history().items()} == {
        "loss": [[3], [5]],
        "rate": [[4], [4]],
    }
    assert list(kept.frame().columns) == [*PLACE, "loss", "rate"]
    assert kept.frame()["rank"].tolist() == [0, 1]


def test_a_run_without_reports_has_no_history() -> None:
    assert Reports.of([]).history() == {}
    assert len(Reports.of([]).frame()) == 0


def test_a_metric_that_is_always_nan_is_in_the_history() -> None:
    history = Reports.of([msgspec.structs.replace(loss(1), own={"loss": math.nan})]).history()
    assert set(history) == {"loss"}
    assert np.isnan(history["loss"]).all()


def test_a_metric_may_have_the_name_of_a_column() -> None:
    frame = Reports.of([msgspec.structs.replace(loss(3, rank=1), own={"rank": 7.0})]).frame()
    assert frame["rank"].tolist() == [1]
    assert frame["rank (reported)"].tolist() == [7]


RECOVERIES = (recover(7, 4, time_s=2.0), recover(9, 6, time_s=4.0))
RECOVERED_TWICE = [
    part
    for rank in (0, 1)
    for part in (
        losses(1, 7, rank),
        losses(5, 9, rank, lost_s=1.6),
        losses(7, 10, rank, lost_s=3.4),
    )
]
"""Reports of both ranks, which made each step from 5 to 9 two or three times."""


def test_a_repeated_step_is_there_once_with_its_last_values() -> None:
    recovered = Reports.of(RECOVERED_TWICE, RECOVERIES)
    np.testing.assert_allclose(
        recovered.history()["loss"], [np.arange(1, 11), np.arange(1, 11) + 0.1]
    )
    frame = recovered.frame()
    assert not frame.duplicated(["rank", "epoch", "step"]).any()
    assert len(frame) == 20
    later = {step: 0.1 * step + (step > 4) * 1.6 + (step > 6) * 1.8 for step in range(1, 11)}
    assert frame[frame["rank"] == 0].set_index("step").time_s.to_dict() == pytest.approx(later)
    axis, places = recovered.axis()
    assert (axis, places.tolist()) == ("step", list(range(1, 11)))


def test_lost_steps_are_left_out_if_the_run_ended_before_them() -> None:
    recovered = Reports.of([losses(1, 7), losses(5, 5, lost_s=1.6)], RECOVERIES[:1])
    np.testing.assert_allclose(recovered.history()["loss"], [[1, 2, 3, 4, 5]])


def test_an_epoch_with_repeated_steps_is_there_once() -> None:
    """The first epoch ends with the step of the checkpoint. The second one is lost."""

    def fit(steps: range, lost_s: float) -> list[Metrics]:
        metrics: list[Metrics] = []
        for step in steps:
            metrics.append(_at(1 + (step - 1) // 4, step, lost_s + step / 10))
            if step % 4 == 0:
                metrics.append(_at(step // 4, -1, lost_s + step / 10 + 0.01))
        return metrics

    once = [(m.epoch, m.step) for m in fit(range(1, 13), 0.0)]
    reports = [*fit(range(1, 10), 0.0), *fit(range(5, 13), 1.6)]
    recovered = Reports.of(reports, RECOVERIES[:1])
    epochs_and_steps = [(int(epoch), int(step)) for _, epoch, step, _ in recovered.places]
    assert epochs_and_steps == once


def _at(epoch: int, step: int, time_s: float) -> Metrics:
    return Metrics(rank=0, cell=1, epoch=epoch, step=step, time_s=time_s, own={"loss": 1.0})


def test_step_time_excludes_the_time_of_a_recovery() -> None:
    reports = [losses(1, 2), losses(3, 3, lost_s=50.0)]
    assert Reports.of(reports, [recover(2, 2, time_s=50.0)]).step_s == pytest.approx(0.1)
    assert Reports.of(reports).step_s > 1


def test_step_time_is_that_of_the_first_rank() -> None:
    reports = [losses(1, 4, rank=1), losses(1, 4, rank=0, lost_s=0.03)]
    assert Reports.of(reports).step_s == pytest.approx(0.1)


def test_a_report_at_the_time_of_a_recovery_follows_it() -> None:
    recovered = Reports.of([losses(1, 5)], [recover(4, 2, time_s=0.5)])
    np.testing.assert_array_equal(recovered.history()["loss"], [[1, 2, 5]])


def test_epochs_and_steps_may_begin_at_0() -> None:
    """The user may number them, as in `for step in range(100)`."""
    lost = [_at(0, step, step / 10) for step in range(4)]
    lost.append(_at(0, -1, 0.35))
    again = [_at(0, step, 1 + step / 10) for step in range(2, 5)]
    recovered = Reports.of([*lost, *again], [recover(3, 1, time_s=0.4)])
    assert recovered.places[:, 2].tolist() == [0, 1, 2, 3, 4]
    assert recovered.history()["loss"].shape == (1, 5)
    axis, places = recovered.axis()
    assert (axis, places.tolist()) == ("step", [0, 1, 2, 3, 4])


def test_the_returned_run_has_each_step_once() -> None:
    recorder = Recorder(1, is_step=False)
    for part in RECOVERED_TWICE[:2]:
        recorder.keep(part)
    recorder.recovered(RECOVERIES[0])
    run = recorder.run()
    assert [m.step for m in run.metrics] == list(range(1, 10))
    assert run.table().lines()[-1].split()[1:] == ["9.000"], "the last value of the epoch"
    assert run.summary.steps == 9
    assert "recovered once" in repr(run)
    undone = Recorder(1, is_step=False)
    undone.keep(RECOVERED_TWICE[0])
    undone.recovered(RECOVERIES[0])
    assert undone.run().last("loss") == 4, "no step after the checkpoint was repeated"


def test_the_history_of_a_fit_does_not_contain_an_evaluation_after_it() -> None:
    epochs = [_at(epoch, -1, epoch / 10) for epoch in (1, 2)]
    kept = Reports.of([*epochs, _at(-1, -1, 0.5)])
    assert kept.history()["loss"].shape == (1, 2)
    assert kept.axis()[1].tolist() == [1, 2]
    (part,) = kept.parts()
    assert part.history()["loss"].shape == (1, 2)
    assert Reports.of([_at(-1, -1, 0.5)]).history()["loss"].shape == (1, 1)
