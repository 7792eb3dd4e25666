from __future__ import annotations

import math

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbdist.records import PLACE, Columns, Metrics
from nbdist.telemetry.history import Reports
from tests.runs import loss

reports = st.builds(
    Metrics,
    rank=st.integers(0, 3),
    cell=st.just(1),
    epoch=st.integers(-1, 2),
    step=st.sampled_from([-1, 1, 2, 3]),
    time_s=st.integers(0, 5).map(float),
    own=st.dictionaries(st.sampled_from("ab"), st.integers(0, 9).map(float)),
    shared=st.dictionaries(st.sampled_from("bc"), st.integers(0, 9).map(float)),
)


@given(st.lists(reports, max_size=12, unique_by=lambda m: (m.rank, m.epoch, m.step)))
def test_every_value_is_at_its_rank_and_step(made: list[Metrics]) -> None:
    chosen = [m for m in made if m.step > 0] or made
    ranks = sorted({m.rank for m in chosen})
    places = sorted({(max(m.step, 0), m.epoch, m.step) for m in chosen})
    history = Reports.of(made).history()
    assert set(history) == {name for m in chosen for name in (*m.own, *m.shared)}
    for name, values in history.items():
        assert values.shape == (len(ranks), len(places))
        expected = {
            (ranks.index(m.rank), places.index((max(m.step, 0), m.epoch, m.step))): value
            for m in chosen
            if (value := m.own.get(name, m.shared.get(name))) is not None
        }
        there = {tuple(where): values[tuple(where)] for where in np.argwhere(~np.isnan(values))}
        assert there == expected


def test_a_later_report_of_the_same_step_counts() -> None:
    later = Metrics(rank=0, cell=1, epoch=1, step=1, time_s=9.0, own={"loss": 5.0, "new": 1.0})
    history = Reports.of([later, loss(1)]).history()
    np.testing.assert_array_equal(history["loss"], [[5]])
    assert list(history) == ["loss", "new"]


def test_what_was_measured_is_no_metric() -> None:
    columns = Columns(measures=("step_s",), own=("loss",), shared=("rate",))
    rows = np.array([[0, 1, 1, 0.1, 0.02, 3, 4], [1, 1, 1, 0.1, 0.02, 5, 4]])
    kept = Reports.of_tables([(columns, rows)])
    assert {name: values.tolist() for name, values in kept.history().items()} == {
        "loss": [[3], [5]],
        "rate": [[4], [4]],
    }
    assert list(kept.frame().columns) == [*PLACE, "loss", "rate"]
    assert kept.frame()["rank"].tolist() == [0, 1]


def test_no_report_is_no_history() -> None:
    assert Reports.of([]).history() == {}
    assert len(Reports.of([]).frame()) == 0


def test_a_loss_that_is_no_number_from_the_first_step_is_there() -> None:
    history = Reports.of([msgspec.structs.replace(loss(1), own={"loss": math.nan})]).history()
    assert set(history) == {"loss"}
    assert np.isnan(history["loss"]).all()


def test_a_metric_may_have_the_name_of_a_column() -> None:
    frame = Reports.of([msgspec.structs.replace(loss(3, rank=1), own={"rank": 7.0})]).frame()
    assert frame["rank"].tolist() == [1]
    assert frame["rank (reported)"].tolist() == [7]
