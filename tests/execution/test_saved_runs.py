from __future__ import annotations

import json
import re
import shutil
import struct
import time
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

import nbdist
from nbdist.execution.saved_runs import SHOWN_RUNS, Comparison
from nbdist.records import RUN_MIME, Columns, Metrics, Output
from nbdist.telemetry.annotations import annotate
from nbdist.views.run.summary import titled
from tests.runs import losses, new_run, recover, rows, writing_process

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.telemetry.run_writer import RunDirectory

WIDE = Columns(measures=("step_s",), own=("loss",), shared=("rate",))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(tmp_path))
    return tmp_path


def trained(root: Path, steps: int = 3, **changes: object) -> RunDirectory:
    """Write a run of two ranks that has ended."""
    run = new_run(root, **{"status": "finished", **changes})
    for rank in (0, 1):
        run.take(losses(1, steps, rank))
    run.update(ended=run.state.began + 185)
    run.close()
    return run


def test_a_run_is_opened_by_position_and_by_id(root: Path) -> None:
    old, new = (trained(root, began=float(began)) for began in (10, 20))
    runs = nbdist.runs()
    assert [run.id for run in runs] == [new.state.id, old.state.id]
    assert runs[-1].id == old.state.id
    assert runs[old.state.id].state == old.state
    assert runs[old.state.short_id].id == old.state.id
    assert [run.id for run in runs[1:]] == [old.state.id]
    with pytest.raises(nbdist.UsageError, match="no run 'nothing' among these 2"):
        _ = runs["nothing"]
    with pytest.raises(IndexError):
        _ = runs[2]


def test_a_recovered_run_has_each_step_once(root: Path) -> None:
    run = new_run(root, replicas=0, recoveries=(recover(7, 4, time_s=2.0),))
    for rank in (0, 1):
        run.take(losses(1, 7, rank))
    for rank in (0, 1):
        run.take(losses(5, 9, rank, lost_s=1.6))
    run.close()
    past = nbdist.runs()[0]
    np.testing.assert_allclose(past.metric("loss")[0], np.arange(1, 10))
    assert [m.step for m in past.run.metrics if m.rank == 1] == list(range(1, 10))
    assert past.run.summary.recoveries == 1
    assert "step 9, loss 9.05 (last step), recovered once" in repr(past)
    assert len(past.to_dataframe()) == 18
    assert has_picture(past._repr_mimebundle_())


def test_a_run_has_arrays_a_data_frame_text_and_a_picture(root: Path) -> None:
    trained(root)
    run = nbdist.runs()[0]
    np.testing.assert_allclose(run.history["loss"], [[1.0, 2.0, 3.0], [1.1, 2.1, 3.1]])
    np.testing.assert_allclose(run.loss, [1.05, 2.05, 3.05])
    assert run.to_dataframe().groupby("rank").loss.max().to_dict() == {0: 3.0, 1: 3.1}
    assert run.cells == "# %% [3] %%dist_run --data train\n"
    bundle = run._repr_mimebundle_()
    assert bundle["text/plain"] == repr(run)
    assert f"{run.state.title} ({run.id[-6:]}): finished in 3 min 05 s, 2 workers" in repr(run)
    assert "step 3, loss 3.05 (last step)" in repr(run)
    assert has_picture(bundle)
    assert bundle[RUN_MIME] == {"id": run.id, "text": repr(run), "over": True}


def has_picture(bundle: dict[str, object]) -> bool:
    return '<img alt="Chart' in str(bundle["text/html"])


def test_a_saved_run_has_the_figures_of_the_original_run(root: Path) -> None:
    """Both use the class `Run` of `Cluster.run`."""
    trained(root, replicas=2, batch=64)
    kept = nbdist.runs()[0]
    assert isinstance(kept.run, nbdist.Run)
    np.testing.assert_array_equal(kept.run.history["loss"], kept.history["loss"])
    assert kept.run.last("loss") == pytest.approx(3.05)
    assert kept.run.summary.batch == 64
    assert kept.run.to_dataframe().equals(kept.to_dataframe())


def test_text_is_stored_by_rank(root: Path) -> None:
    run = new_run(root)
    run.take(Output(rank=1, cell=1, stream="stdout", text="hello\n"))
    run.close()
    assert nbdist.runs()[0].output(1) == "hello\n"
    assert nbdist.runs()[0].output(0) == ""


def test_an_active_run_has_its_current_data(root: Path) -> None:
    run = new_run(root)
    stored = nbdist.runs()[0]
    assert stored.history == {}
    assert "running, 2 workers" in repr(stored)
    with pytest.raises(KeyError, match=rf"'loss' was not reported by run {run.state.id}.*none"):
        _ = stored.loss
    bundle = stored._repr_mimebundle_()
    assert set(bundle) == {"text/plain", RUN_MIME}
    assert bundle[RUN_MIME] == {"id": stored.id, "text": repr(stored), "over": False}
    run.take(losses(1, 2))
    run.flush()
    np.testing.assert_array_equal(stored.loss, [1, 2])
    run.close()


def test_the_history_of_a_fit_contains_its_epochs(root: Path) -> None:
    """Measured batches are only in the tables."""
    run = new_run(root, replicas=0)
    run.take(rows([[0, 1, 1, 0.1, 0.02, 4, 0.5]], WIDE))
    run.take(Metrics(rank=0, cell=1, epoch=1, step=-1, time_s=0.2, own={"loss": 3.0}))
    run.close()
    np.testing.assert_array_equal(nbdist.runs()[0].history["loss"], [[3]])
    assert [m.step for m in nbdist.runs()[0].run.metrics] == [-1]


def test_a_fit_that_ends_in_its_first_epoch_has_a_picture_of_its_steps(root: Path) -> None:
    run = new_run(root, replicas=0, kind="fit")
    run.take(rows([[0, 1, step, step / 10, 0.02, 4.0 / step, 0.5] for step in (1, 2, 4)], WIDE))
    run.close()
    saved = nbdist.runs()[0]
    assert "step 1 to 4, mean from 4 to 1" in str(saved._repr_mimebundle_()["text/html"])
    assert "epoch 1, step 4, loss 1 (epoch mean)" in repr(saved)


def test_metrics_in_several_tables_are_one_history(root: Path) -> None:
    run = new_run(root)
    run.take(rows([[0, 1, 1, 0.1, 0.02, 4, 0.5], [1, 1, 1, 0.1, 0.02, np.nan, 0.5]], WIDE))
    run.take(
        Metrics(rank=0, cell=1, epoch=1, step=2, time_s=0.2, own={"loss": 3.0, "late": np.inf})
    )
    run.close()
    history = nbdist.runs()[0].history
    np.testing.assert_array_equal(history["loss"], [[4, 3], [np.nan, np.nan]])
    np.testing.assert_array_equal(history["late"], [[np.nan, np.inf], [np.nan, np.nan]])
    assert set(history) == {"loss", "rate", "late"}
    # no warning for a step without reports
    assert has_picture(nbdist.runs()[0]._repr_mimebundle_())


def test_runs_are_listed_as_text_and_as_a_page(root: Path) -> None:
    assert repr(nbdist.runs()) == "no stored runs"
    done = trained(root, name="a long name " * 9)
    text = repr(nbdist.runs())
    short = done.state.short_id
    line = rf"\n0 +{short} +a long name .*… .* finished +2 +3 +3\.05 \(last step\) +3 min 05 s"
    assert re.search(line, text)
    assert short in nbdist.runs()._repr_mimebundle_()["text/html"]


def test_a_long_list_shows_the_number_of_omitted_runs(root: Path) -> None:
    for began in range(SHOWN_RUNS + 2):
        new_run(root, began=float(began)).close()
    text = repr(nbdist.runs())
    assert text.startswith(f"{SHOWN_RUNS + 2} runs\n")
    assert text.endswith("and 2 older runs")


def test_a_run_deleted_after_its_listing_is_skipped(root: Path) -> None:
    kept, gone = trained(root, began=20.0), trained(root, began=10.0)
    runs = nbdist.runs()
    shutil.rmtree(gone.path)
    assert kept.state.short_id in repr(runs)
    assert gone.state.short_id not in repr(runs)
    with pytest.raises(FileNotFoundError):
        _ = runs[1].history


def test_runs_are_compared(root: Path) -> None:
    long, short = trained(root, steps=5, began=10.0), trained(root, steps=2, began=20.0)
    compared = nbdist.runs().compare(0, long.state.id)
    assert {name: values.shape for name, values in compared.values.items()} == {
        short.state.id: (2, 2),
        long.state.id: (2, 5),
    }
    bundle = compared._repr_mimebundle_()
    assert has_picture(bundle)
    assert bundle["text/plain"] == (
        f"{titled(short.state)}  loss 2.05 after 2 steps\n"
        f"{titled(long.state)}  loss 5.05 after 5 steps"
    )


def test_invalid_comparisons_are_refused(root: Path) -> None:
    trained(root)
    with pytest.raises(nbdist.UsageError, match=r"compare\(0, 1\)"):
        nbdist.runs().compare()
    with pytest.raises(
        KeyError, match=r"'accuracy' was not reported by run .* reported metrics: loss"
    ):
        nbdist.runs().compare(0, metric="accuracy")


@pytest.mark.processes
def test_a_run_of_a_dead_kernel_is_lost(root: Path) -> None:
    program = "run = new_run(root)\nrun.take(losses(1, 2))\nrun.flush()\nprint(flush=True)\n"
    with writing_process(f"{program}time.sleep(600)", root) as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()
    (run,) = nbdist.runs()
    assert run.state.status == "lost"
    assert 0 < run.state.ended <= time.time()
    np.testing.assert_array_equal(run.loss, [1, 2])


OLDEST = {
    "id": "20260101-120000-abcdef",
    "number": 1,
    "label": 3,
    "header": "%%dist_run --data train",
    "strategy": "mirrored",
    "framework": "TensorFlow 2.21",
    "status": "finished",
    "began": 100.0,
    "ended": 103.0,
    "workers": [{"rank": 0, "host": "a", "pid": 1, "devices": "1 x cpu", "status": "finished"}],
    "versions": {"tensorflow": "2.21"},
    "writer": {"host": "a", "pid": 1, "started": 5.0},
    "replicas": 1,
    "findings": [{"topic": "network", "text": "slow"}],
    "version": 1,
}
"""Content of `run.json` as the first version of the format contains it."""


def old_run(root: Path, **changes: object) -> str:
    """Write a run as an older version has written it, and return its id."""
    content = OLDEST | changes
    name = str(OLDEST["id"])
    (root / name).mkdir()
    (root / name / "run.json").write_text(json.dumps(content))
    tables = root / name / "tables"
    tables.mkdir()
    (tables / "0.json").write_text('{"number": 0, "columns": {"own": ["loss"]}}')
    (tables / "0.f64").write_bytes(struct.pack("<5d", 0, 1, 1, 0.1, 2.5))
    return name


def test_a_run_of_the_first_version_is_read(root: Path) -> None:
    name = old_run(root)
    run = nbdist.runs()[name]
    assert run.loss.tolist() == [2.5]
    assert run.state.recoveries == ()
    assert nbdist.runs().to_dataframe()["seconds"].tolist() == [3.0]
    assert "loss 2.5" in repr(run)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "it has version 2, and this nbdist reads version 1"),
        ({"workers": 4}, r"Expected `array`, got `int` - at `\$.workers`"),
        ({"status": "resting"}, "Invalid enum value 'resting'"),
    ],
)
def test_a_run_of_another_version_is_refused(
    root: Path, changes: dict[str, object], reason: str
) -> None:
    readable = trained(root)
    name = old_run(root, **changes)
    runs = nbdist.runs()
    assert [run.id for run in runs] == [readable.state.id]
    message = rf"run {name}: another version of nbdist wrote its run.json: {reason}"
    assert re.search(f"not listed: {message}", repr(runs))
    with pytest.raises(nbdist.UsageError, match=rf"run {name} cannot be read: .*{reason}.*open it"):
        _ = runs[name]


def test_runs_behave_as_a_sequence(root: Path) -> None:
    old, new = (trained(root, began=float(began)) for began in (10, 20))
    runs = nbdist.runs()
    assert runs == nbdist.runs() != runs[1:]
    assert runs[0] in nbdist.runs()
    assert runs.index(runs[1]) == 1
    assert list(dict(runs)) == [new.state.id, old.state.id]
    assert dict(runs)[old.state.id] == runs[1]
    assert len({runs[0], nbdist.runs()[0]}) == 1


def test_runs_become_a_data_frame(root: Path) -> None:
    trained(root, began=0.0)
    trained(root, steps=5, began=60.0)
    frame = nbdist.runs().to_dataframe()
    assert frame["loss"].tolist() == [pytest.approx(5.05), pytest.approx(3.05)]
    assert frame["steps"].tolist() == [5, 3]
    assert frame["seconds"].tolist() == [185, 185]
    assert str(frame["began"].dtype).startswith("datetime64")
    assert frame.sort_values("loss")["id"].tolist() == [run.id for run in reversed(nbdist.runs())]
    empty = nbdist.runs()[:0].to_dataframe()
    assert [*empty.columns, "metrics.loss"] == list(frame.columns)


def test_a_data_frame_has_edits_and_hyperparameters_and_becomes_parquet(
    root: Path, tmp_path: Path
) -> None:
    scheduled: dict[str, float | str] = {"learning_rate": "CosineDecay", "width": 64}
    for began, hyperparameters in enumerate((scheduled, {"learning_rate": 0.1}, {})):
        run = trained(root, began=float(began), hyperparameters=hyperparameters)
    annotate(run.path, {"name": "best", "tags": ["a", "b"], "note": "kept", "pinned": True})
    frame = nbdist.runs().to_dataframe()
    edits = frame.loc[0, ["name", "tags", "note", "pinned"]]
    assert edits.tolist() == ["best", ["a", "b"], "kept", True]
    assert frame["metrics.loss"].tolist() == frame["loss"].tolist()
    assert frame["hyperparameters.learning_rate"].tolist()[1:] == ["0.1", "CosineDecay"]
    assert frame["hyperparameters.width"].tolist()[2] == 64
    assert frame["hyperparameters.width"].isna().tolist() == [True, True, False]
    frame.to_parquet(tmp_path / "runs.parquet")
    assert pd.read_parquet(tmp_path / "runs.parquet")["id"].tolist() == frame["id"].tolist()


def test_a_metric_of_some_steps_is_compared_at_them() -> None:
    values = np.full((2, 45), np.nan)
    values[:, [0, 19, 39]] = [[3.0, 2.0, 1.0], [5.0, 4.0, 3.0]]
    comparison = Comparison("grad_norm", {"a": values}, {"a": "Cell 1"})
    assert repr(comparison) == "Cell 1  grad_norm 2 after 40 steps"


def test_a_last_value_that_is_not_finite_is_shown() -> None:
    values = np.array([[1.0, 2.0, np.nan]])
    assert repr(Comparison("loss", {"a": values}, {"a": "Cell 1"})) == (
        "Cell 1  loss nan after 3 steps"
    )
