"""Rows of the table of all runs, and curves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from nbdist.records import SYSTEM, Annotations, Columns, RunRow
from nbdist.telemetry.annotations import annotate
from nbdist.telemetry.run_table import RunRows, curve, last_values
from tests.runs import losses, new_run, read, recover, rows

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import Rows
    from nbdist.telemetry.run_writer import RunDirectory

SHARED = Columns(measures=("step_s",), shared=("loss",))


def stored(root: Path, *records: Rows, **changes: object) -> RunDirectory:
    """Return an ended run with these records."""
    run = new_run(root, **{"status": "finished", "ended": 2.0, **changes})
    for record in records:
        run.take(record)
    run.close()
    return run


def only(table: RunRows) -> RunRow:
    (row,) = table.table().rows
    return row


def test_a_row_has_state_edits_and_last_values(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = stored(root, losses(1, 5), losses(1, 5, rank=1), hyperparameters={"lr": 0.1})
    annotate(run.path, {"tags": ["a"]})
    row = only(RunRows(root, tmp_path))
    assert row.state.hyperparameters == {"lr": 0.1}
    assert (row.state.id, row.state.status) == (run.state.id, "finished")
    assert (row.state.workers, row.state.versions, row.ranks) == ((), {}, 2)
    assert row.annotations == Annotations(tags=("a",))
    assert row.metrics == {"loss": 5.05}
    assert row.step == 5


def test_runs_are_ordered_and_others_are_skipped(tmp_path: Path) -> None:
    table = RunRows(tmp_path, tmp_path)
    assert table.table().rows == ()
    old, new, damaged = (stored(tmp_path, began=float(began)) for began in (1, 3, 2))
    (damaged.path / "run.json").write_text('{"version": 99}')
    (tmp_path / "other").mkdir()
    (tmp_path / "20260101-000000-abcdef").symlink_to(old.path)
    assert [row.state.id for row in table.table().rows] == [new.state.id, old.state.id]


def test_changes_of_files_change_the_row(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    table = RunRows(tmp_path, tmp_path)
    assert only(table).step == -1
    run.take(losses(1, 3))
    run.flush()
    assert only(table).step == 3
    run.update(status="failed", error="no memory")
    assert only(table).state.error == "no memory"
    annotate(run.path, {"name": "best"})
    assert only(table).annotations.name == "best"
    run.discard()
    assert table.table().rows == ()


def test_a_row_of_an_ended_run_is_read_once(tmp_path: Path) -> None:
    run = stored(tmp_path, losses(1, 3))
    table = RunRows(tmp_path, tmp_path)
    first = only(table)
    os.truncate(run.path / "tables" / "0.f64", 0)
    assert only(table) is first


@pytest.mark.parametrize(
    ("notebook", "served"),
    [
        ("home/a.ipynb", "a.ipynb"),
        ("home/sub/b.ipynb", "sub/b.ipynb"),
        ("home/gone.ipynb", ""),
        ("outside.ipynb", ""),
        ("home/../outside.ipynb", ""),
        ("", ""),
    ],
)
def test_only_notebooks_of_the_server_are_named(tmp_path: Path, notebook: str, served: str) -> None:
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    for file in (home / "a.ipynb", home / "sub" / "b.ipynb", tmp_path / "outside.ipynb"):
        file.touch()
    stored(tmp_path / "runs", notebook=f"{tmp_path}/{notebook}" if notebook else "")
    assert only(RunRows(tmp_path / "runs", home)).notebook == served


def test_last_values_are_those_that_no_recovery_superseded(tmp_path: Path) -> None:
    run = stored(tmp_path, losses(1, 6), recoveries=(recover(6, 4, time_s=1.0),))
    assert last_values(read(run), run.state) == (4, {"loss": 4.0})


def test_a_run_with_samples_of_its_hosts_is_listed(tmp_path: Path) -> None:
    sample = rows([[0, -1, -1, 2.0, 0.5, 0.25]], Columns(system=SYSTEM[:2]))
    stored(tmp_path, losses(1, 3), sample)
    row = only(RunRows(tmp_path, tmp_path))
    assert (row.step, row.metrics) == (3, {"loss": 3.0})


def test_values_that_are_not_finite_are_none(tmp_path: Path) -> None:
    run = stored(tmp_path, rows([[0, 1, 1, 0.1, float("nan")]]))
    assert last_values(read(run), run.state) == (1, {"loss": None})
    assert curve(read(run), "loss").y == (None,)


def test_signals_of_a_fit_are_among_its_last_values(tmp_path: Path) -> None:
    columns = Columns(measures=("step_s",), shared=("loss", "grad_norm"))
    run = stored(tmp_path, rows([[0, 1, 1, 0.1, 0.1, 9.0, 0.5]], columns), replicas=0, kind="fit")
    assert last_values(read(run), run.state) == (1, {"loss": 9.0, "grad_norm": 0.5})


def test_the_last_values_of_a_fit_are_those_of_its_epochs(tmp_path: Path) -> None:
    batches = rows([[0, 1, step, step / 10, 0.1, 9.0] for step in (1, 2)], SHARED)
    epochs = rows([[0, 1, -1, 0.2, 3.0]], Columns(shared=("loss",)))
    run = stored(tmp_path, batches, epochs, replicas=0, kind="fit")
    assert last_values(read(run), run.state) == (2, {"loss": 3.0})
    steps = stored(tmp_path, batches, epochs, replicas=2, kind="step")
    assert last_values(read(steps), steps.state) == (2, {"loss": 9.0})
    found = curve(read(run), "loss")
    assert (found.axis, found.x, found.y) == ("step", (1.0, 2.0), (9.0, 9.0))


def test_a_curve_is_the_mean_over_ranks(tmp_path: Path) -> None:
    run = stored(tmp_path, losses(1, 3), losses(1, 3, rank=1))
    found = curve(read(run), "loss")
    assert found.axis == "step"
    assert found.x == (1, 2, 3)
    assert found.seconds == pytest.approx((0.1, 0.2, 0.3))
    assert found.y == pytest.approx((1.05, 2.05, 3.05))


def test_a_curve_without_steps_counts_epochs_or_reports(tmp_path: Path) -> None:
    epochs = stored(tmp_path, rows([[0, epoch, -1, epoch, epoch] for epoch in (1, 2)]))
    assert curve(read(epochs), "loss").axis == "epoch"
    assert curve(read(epochs), "loss").x == (1, 2)
    bare = [rows([[rank, -1, -1, n, 10 * rank + n] for n in (1, 2)], rank=rank) for rank in (0, 1)]
    found = curve(read(stored(tmp_path, *bare)), "loss")
    assert (found.axis, found.x, found.y) == ("report", (1, 2), (6, 7))


def test_a_curve_has_a_limited_number_of_points(tmp_path: Path) -> None:
    run = stored(tmp_path, losses(1, 10))
    found = curve(read(run), "loss", points=4)
    assert found.x == (2, 5, 8, 10)
    assert found.y == (2, 5, 8, 10)


def test_a_curve_leaves_out_superseded_reports(tmp_path: Path) -> None:
    run = stored(tmp_path, losses(1, 6), recoveries=(recover(6, 4, time_s=1.0),))
    assert curve(read(run), "loss").x == (1, 2, 3, 4)


def test_a_missing_metric_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="accuracy"):
        curve(read(stored(tmp_path, losses(1, 2))), "accuracy")
