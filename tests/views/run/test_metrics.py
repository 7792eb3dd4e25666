"""Lines and tables of reported scalars."""

from __future__ import annotations

import pytest

from nbdist.records import Metrics
from nbdist.views.run import metrics as module
from nbdist.views.run.metrics import STEP_INTERVAL_S, WAIT_S, MetricsLines, MetricTable, describe
from tests.clock import Clock, replace_time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, module)


def report(
    rank: int,
    epoch: int = -1,
    step: int = -1,
    shared: dict[str, float] | None = None,
    **own: float,
) -> Metrics:
    return Metrics(
        rank=rank, cell=1, epoch=epoch, step=step, time_s=1.0 + rank, own=own, shared=shared or {}
    )


def lines(*reports: Metrics, ranks: tuple[int, ...] = (0, 1)) -> MetricsLines:
    made = MetricsLines(ranks)
    for one in reports:
        made.add(one)
    return made


def test_a_line_waits_for_all_ranks(clock: Clock) -> None:
    made = lines(report(0, 1, loss=0.5))
    assert list(made.take()) == []
    made.add(report(1, 1, loss=0.25))
    assert list(made.take()) == ["epoch 1  loss 0.375 [0.5 0.25]  2 s"]
    assert list(made.take(everything=True)) == []


def test_a_line_names_a_rank_that_is_late_and_is_not_repeated(clock: Clock) -> None:
    made = lines(report(0, 1, loss=0.5))
    clock.now += WAIT_S / 2
    assert list(made.take()) == []
    clock.now += WAIT_S / 2
    assert list(made.take()) == ["epoch 1  loss 0.5  1 s  (rank 1 has not reported)"]
    made.add(report(1, 1, loss=0.25))
    assert list(made.take(everything=True)) == []
    made.add(report(0, 2, loss=1.0))
    assert list(made.take()) == [], "rank 1 reports, so the next line waits for it"
    made.add(report(1, 2, loss=3.0))
    assert list(made.take()) == ["epoch 2  loss 2 [1 3]  2 s"]


def test_values_over_all_ranks_need_no_report_of_each(clock: Clock) -> None:
    made = lines(report(0, 1, shared={"loss": 0.5}))
    clock.now += WAIT_S
    assert list(made.take()) == ["epoch 1  loss 0.5  1 s"]


def test_later_lines_do_not_wait_for_a_rank_that_never_reports(clock: Clock) -> None:
    made = lines(report(0, 1, loss=0.5))
    clock.now += WAIT_S
    assert list(made.take()) == ["epoch 1  loss 0.5  1 s  (rank 1 has not reported)"]
    made.add(report(0, 2, loss=0.25))
    assert list(made.take()) == ["epoch 2  loss 0.25  1 s"]


def test_lines_keep_their_order(clock: Clock) -> None:
    made = lines(report(0, 1, loss=0.5), report(0, 2, loss=1.0), report(1, 2, loss=1.0))
    assert list(made.take()) == []
    made.add(report(1, 1, loss=0.5))
    assert [line.split("  ")[0] for line in made.take()] == ["epoch 1", "epoch 2"]


def test_a_repeated_epoch_is_shown_again_after_a_recovery(clock: Clock) -> None:
    made = lines(report(0, 1, loss=0.5))
    clock.now += WAIT_S
    list(made.take())
    made.restart()
    made.add(report(0, 1, loss=0.5))
    made.add(report(1, 1, loss=0.5))
    assert list(made.take()) == ["epoch 1  loss 0.5  2 s"]


def test_the_end_shows_incomplete_lines(clock: Clock) -> None:
    made = lines(report(0, 1, loss=0.5), report(1, 2, loss=0.25))
    assert len(list(made.take(everything=True))) == 2


def test_a_second_report_of_a_rank_extends_its_first(clock: Clock) -> None:
    made = lines(
        report(0, 1, shared={"acc": 0.5}, loss=0.5),
        report(0, 1, shared={"norm": 2.0}, val_loss=0.75),
        ranks=(0,),
    )
    assert list(made.take()) == ["epoch 1  loss 0.5  acc 0.5  norm 2  val_loss 0.75  1 s"]


def test_only_some_steps_are_shown(clock: Clock) -> None:
    made = lines(*(report(0, step=step, loss=step) for step in (1, 2, 3)), ranks=(0,))
    assert list(made.take()) == ["step 1  loss 1  1 s"]
    made.add(report(0, 1, loss=9.0))  # epochs are always shown
    assert list(made.take()) == ["epoch 1  loss 9  1 s"]
    clock.now += STEP_INTERVAL_S
    made.add(report(0, step=4, loss=4.0))
    assert list(made.take()) == ["step 4  loss 4  1 s"]
    assert list(made.take(everything=True)) == ["(2 further steps are in the run's metrics)"]


def test_the_loss_is_first_and_reduced_values_are_alone() -> None:
    group = {
        1: report(1, 2, 7, shared={"acc": 0.5}, x=2.0, loss=3.0),
        0: report(0, 2, 7, shared={"acc": 0.5}, x=2.0, loss=1.0),
    }
    assert describe(group) == "epoch 2 step 7  loss 2 [1 3]  acc 0.5  x 2  2 s"


def test_a_reduced_value_precedes_those_of_the_ranks() -> None:
    group = {0: report(0, shared={"loss": 5.0}, loss=1.0), 1: report(1, loss=2.0)}
    assert describe(group) == "loss 5 [1 2]  2 s"


def test_a_value_of_another_rank_only_is_shown() -> None:
    group = {0: report(0, loss=1.0), 1: report(1, x=2.0)}
    assert describe(group) == "loss 1  x 2  2 s"


def rows(*reports: Metrics, name: str = "loss") -> list[list[str]]:
    table = MetricTable(reports, name, "title")
    header, _, *found = table.lines()[1:]
    return [header.split(), *(line.split() for line in found)]


def test_a_table_has_a_row_for_each_rank_and_a_column_for_each_epoch() -> None:
    reports = (
        report(1, 1, loss=0.5),
        report(0, 1, loss=1.0),
        report(0, 2, loss=0.125),
        report(0, 2, step=9, x=1.0),
        report(0, step=9, loss=7.0),
    )
    assert rows(*reports) == [
        ["rank", "epoch", "1", "epoch", "2"],
        ["0", "1.000", "0.1250"],
        ["1", "0.5000"],
    ]
    assert rows(*reports, name="x") == [["rank", "epoch", "2"], ["0", "1.000"]]


def test_a_table_without_epochs_has_steps() -> None:
    reports = (report(0, step=2, loss=12345.0), report(0, step=3, shared={"loss": 1.0}))
    assert rows(*reports) == [["rank", "step", "2", "step", "3"], ["0", "1.234e+04", "1.000"]]


def test_the_value_of_a_rank_precedes_the_reduced_one() -> None:
    assert rows(report(0, 1, shared={"loss": 5.0}, loss=1.0))[1] == ["0", "1.000"]


def test_a_table_is_shown_as_html_too() -> None:
    table = MetricTable([report(0, 1, loss=0.5)], "loss", "<title>")
    assert "&lt;title&gt;" in table._repr_html_()
    assert "0.5000" in table._repr_html_()
    assert repr(table).startswith("<title>\n")
