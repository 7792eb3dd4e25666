"""Live runs and their stored files, on real engines."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import nbdist
from nbdist.execution import live_run
from nbdist.records import (
    CellRequest,
    Columns,
    DataTable,
    Histogram,
    Image,
    Rows,
    StepOptions,
    Text,
    WorkerState,
)
from nbdist.settings import Settings
from nbdist.telemetry.run_reader import stored_runs
from tests import clusters
from tests.runs import ids, largest_file, latest, losses, recover, reports, send

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records import AnyEvent, Finding

SETUP = "import numpy as np, jax.numpy as jnp\nones = np.ones(64, 'float32')\nweight = jnp.zeros(3)"
STEP = "weight = weight + batch.mean()\nloss = weight[0]"
OPTIONS = StepOptions(data="ones", batch=8, epochs=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=3, framework="jax") as running:
        running.run(SETUP)
        yield running


def findings(cluster: nbdist.Cluster, topic: str) -> list[Finding]:
    """Return the findings of the topic in the state file of the latest run."""
    return [f for f in latest(cluster).state().findings if f.topic == topic]


def own_run(cluster: nbdist.Cluster) -> str:
    """Return the beginning of a cell that reports once and reads its own stored run as `own`."""
    return (
        "import pathlib, time\n"
        "from nbdist.telemetry.run_reader import stored_runs\n"
        "report(loss=1.0)\n"
        f"own = stored_runs(pathlib.Path({str(cluster.settings.runs_path)!r}))[0]\n"
    )


MEDIA = """
import numpy as np, pandas as pd
for step in range(3):
    report(
        loss=1.0 / (step + 1),
        hist={"params": {"weight": weight + step}},
        image={"sample": np.full((4, 6, 3), 0.5)},
        table={"errors": pd.DataFrame({"rank": [rank], "label": ["cat"]})},
        text=f"step {step}",
    )
"""


def test_a_cell_reports_media_beside_scalars(cluster: nbdist.Cluster) -> None:
    cluster.run(MEDIA)
    run = nbdist.runs()[0]
    np.testing.assert_array_equal(run.loss, [1, 1 / 2, 1 / 3])
    assert {item.name for item in run.media()} == {"params/weight", "sample", "errors", "text"}
    texts = [(item.rank, item.step, item.content) for item in run.media("text")]
    assert sorted(texts, key=str) == sorted(
        ((rank, step + 1, Text(text=f"step {step}")) for rank in range(3) for step in range(3)),
        key=str,
    )
    tables = {item.rank: item.content for item in run.media("errors")}
    assert tables[2] == DataTable(columns=("rank", "label"), rows=((2, "cat"),))
    image = run.media("sample")[0].content
    assert isinstance(image, Image)
    assert (image.width, image.height) == (6, 4)
    last = max(run.media("params/weight"), key=lambda item: item.step).content
    assert isinstance(last, Histogram)
    assert (last.size, last.mean) == (3, pytest.approx(2.0))


def test_a_bad_image_is_refused_by_its_name(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match="image 'x': some pixels are NaN or infinite"):
        cluster.run("import numpy as np\nreport(image={'x': np.full((2, 2), np.nan)})")


def test_a_reduced_value_is_remarked_once(cluster: nbdist.Cluster) -> None:
    cluster.run("for step in range(3):\n    report(table={'t': {'a': range(2000)}})")
    (remark,) = findings(cluster, "media")
    assert remark.text == "table 't': shows the first 1000 of 2,000 rows"
    assert not remark.warning


def test_step_cell_is_stored(cluster: nbdist.Cluster) -> None:
    run = cluster.run(STEP, step=OPTIONS, label=7, header="%%dist_run --data ones")
    stored = nbdist.runs()[0]
    state = stored.state
    assert (state.status, state.label, state.steps, state.batch) == ("finished", 7, 16, 8)
    assert state.ended > state.began
    assert state.versions.keys() == {"python", "jax"}
    assert [(w.rank, w.status, w.devices) for w in state.workers] == [
        (rank, "finished", "1 x cpu") for rank in range(3)
    ]
    assert stored.cells.endswith(f"# %% [7] %%dist_run --data ones\n{STEP}")
    assert SETUP in stored.cells, "cells.py contains the cells that the step needs"
    np.testing.assert_array_equal(stored.history["loss"], run.history["loss"])
    assert stored.history["loss"].shape == (3, 16)
    tables = {table.columns.measures for table in latest(cluster).tables()}
    assert ("step_s", "input_s") in tables
    assert ("process_bytes",) in tables
    assert ("report_s",) not in tables


def test_stored_times_and_memory_are_correct(cluster: nbdist.Cluster) -> None:
    """The stored input time covers a wait of 20 ms for each batch."""
    cluster.run(
        "import time\n"
        "def slow():\n"
        "    for _ in range(10):\n"
        "        time.sleep(0.02)\n"
        "        yield np.ones(8, 'float32')\n"
    )
    cluster.run(STEP, step=StepOptions(data="slow"))
    table = next(t for t in latest(cluster).tables() if "input_s" in t.columns.measures)
    rows = latest(cluster).array(table)
    step_s = rows[:, table.columns.names.index("step_s")]
    input_s = rows[:, table.columns.names.index("input_s")]
    assert (input_s > 0.015).all()
    assert np.median(input_s / step_s) > 0.5
    memory = next(t for t in latest(cluster).tables() if "process_bytes" in t.columns.measures)
    assert (latest(cluster).array(memory)[:, -1] > 1e7).all()


def test_use_of_the_hosts_is_sampled_during_a_cell(cluster: nbdist.Cluster) -> None:
    """The cell waits for the first sample of its own run."""
    cluster.run(
        own_run(cluster) + "until = time.monotonic() + 60\n"
        "while not any(t.columns.system for t in own.tables()) and time.monotonic() < until: pass\n"
    )
    (table,) = [table for table in latest(cluster).tables() if table.columns.system]
    (busy, *_) = latest(cluster).array(table)[:, table.columns.names.index("cpu_cores")]
    assert 0 < busy < 100
    assert reports(latest(cluster))[0].shape == (3, 5)


def test_requested_stack_of_a_rank_is_stored(cluster: nbdist.Cluster) -> None:
    """The cell asks for its own stack, as a browser does."""
    cluster.run(
        own_run(cluster) + "if rank == 1:\n"
        "    own.ask_for_stack(1)\n"
        "    until = time.monotonic() + 60\n"
        "    while own.stack(1) is None and time.monotonic() < until: pass\n"
    )
    stack = latest(cluster).stack(1)
    assert stack is not None
    assert "while own.stack(1) is None" in stack.stack
    assert stack.threads.startswith("MainThread:\n")
    assert "nbdist-reporter" in stack.threads
    assert latest(cluster).stack(0) is None


def test_reports_of_a_plain_cell_are_stored_with_nan_and_inf(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "report(loss=1.0)\n"
        "report(loss=float('nan'), late=2.0)\n"
        "if rank == 1:\n"
        "    report(loss=float('inf'), only_here=3)\n"
        "print('said by', rank)"
    )
    stored = nbdist.runs()[0]
    assert stored.state.status == "finished"
    assert stored.output(1) == "said by 1\n"
    history = stored.history
    assert set(history) == {"loss", "late", "only_here"}
    assert history["loss"][:, 0].tolist() == [1, 1, 1]
    assert math.isinf(history["loss"][1, 2])
    assert np.isnan(history["only_here"][[0, 2]]).all()


def test_loop_that_reports_has_the_times_between_its_reports(cluster: nbdist.Cluster) -> None:
    run = cluster.run("for i in range(0, 50, 10):\n    report(loss=i, step=i)")
    (table,) = [t for t in latest(cluster).tables() if t.columns.measures == ("report_s",)]
    rank, _, step, _, seconds = latest(cluster).array(table).T
    assert sorted(zip(rank, step, strict=True)) == [
        (r, s) for r in range(3) for s in (10, 20, 30, 40)
    ]
    assert (seconds > 0).all()
    assert findings(cluster, "straggler") == []
    assert run.history["loss"].shape == nbdist.runs()[0].history["loss"].shape == (3, 5)


def test_cell_without_reports_stores_no_run(cluster: nbdist.Cluster) -> None:
    before = ids(cluster)
    run = cluster.run("print('hello')")
    assert ids(cluster) == before
    assert re.search(
        r"^<nbdist run Cell \d+, [\d:]+: finished in [\d.]+ m?s, 3 workers>$", repr(run)
    )


def test_failed_run_stores_rank_and_error(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError):
        cluster.run("report(loss=1.0)\nif rank == 2:\n    raise ValueError('no such day')")
    state = latest(cluster).state()
    assert state.status == "failed"
    assert state.error.startswith("ValueError on rank 2@")
    assert "no such day" in state.error
    assert next(w for w in state.workers if w.rank == 2).said == "ValueError: no such day"


def test_run_continues_if_it_cannot_be_stored(
    cluster: nbdist.Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    settings = msgspec.structs.replace(cluster.settings, runs_folder=str(tmp_path / "file"))
    monkeypatch.setattr(cluster, "settings", settings)
    run = cluster.run(STEP, step=OPTIONS)
    assert run.loss.shape == (16,)
    assert "nbdist: this run is not stored: " in capsys.readouterr().err


def test_old_runs_are_removed_with_a_message(
    cluster: nbdist.Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = msgspec.structs.replace(cluster.settings, runs_folder=str(tmp_path), kept_runs=2)
    monkeypatch.setattr(cluster, "settings", settings)
    for _ in range(3):
        cluster.run("report(loss=1.0)")
    assert len(ids(cluster)) == 2
    assert "removed 1 old run, keeping 2 (the setting NBDIST_KEPT_RUNS)" in capsys.readouterr().err


@pytest.mark.full  # tests/telemetry/test_run_writer.py
def test_run_continues_if_its_folder_is_deleted(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deliver, before = cluster._worker_group.receiver.subscribers.deliver, ids(cluster)

    def intercept(record: AnyEvent) -> None:
        for run in ids(cluster) - before:
            shutil.rmtree(cluster.settings.runs_path / run, ignore_errors=True)
        deliver(record)

    monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)
    run = cluster.run("report(loss=1.0)\nreport(loss=2.0)")
    assert run.history["loss"].shape == (3, 2)
    assert ids(cluster) <= before
    assert "could not be" in capsys.readouterr().err


MANY = 3000
FULL_BUFFER = f"""
from nbdist.worker.runtime import row_buffer
room, row_buffer.ROOM_ROWS = row_buffer.ROOM_ROWS, 10
try:
    for number in range({MANY}):
        report(loss=number)
finally:
    row_buffer.ROOM_ROWS = room
"""


def test_reports_lost_in_a_full_buffer_are_counted(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster.run(FULL_BUFFER)
    lost = 3 * MANY - np.isfinite(run.history["loss"]).sum()
    assert lost > 0
    (dropped,) = findings(cluster, "dropped")
    assert dropped.value == lost
    assert dropped.text.startswith(f"{lost:,} reports were lost: the buffer of a rank was full")
    assert f"nbdist: {dropped.text}\n" in capsys.readouterr().err


@pytest.mark.full  # tests/telemetry/test_run_writer.py
def test_rows_lost_on_a_full_disk_are_reported(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(300_000):  # the cells of the session, which are stored too, are smaller
        run = cluster.run(f"for number in range({MANY}):\n    report(loss=number)")
    assert run.history["loss"].shape == (3, MANY), "the notebook keeps all rows"
    assert latest(cluster).state().status == "finished"
    kept = [
        latest(cluster).count(table)
        for table in latest(cluster).tables()
        if table.columns.own or "report_s" in table.columns.measures
    ]
    intervals = MANY - 1
    lost = 3 * (MANY + intervals) - sum(kept)
    (disk,) = findings(cluster, "disk")
    assert disk.text.startswith(f"{lost} rows could not be stored")
    assert "too large" in disk.text
    assert f"nbdist: {disk.text}\n" in capsys.readouterr().err


def test_output_lost_on_a_full_disk_is_reported(tmp_path: Path) -> None:
    request = CellRequest(number=1, source="", label=1, strategy=None, awaits=False)
    run = live_run.begin(request, "%%dist_run", [""], [], Settings(runs_folder=str(tmp_path)))
    send(run, losses(1, 3))
    assert run.end("finished") == ()
    run.show("x" * 30_000)
    with largest_file(20_000):
        run.close()
    (stored,) = stored_runs(tmp_path)
    (disk,) = stored.state().findings
    assert disk.topic == "disk"
    assert "cannot store all output of the cell" in disk.text


def test_rows_without_metrics_are_not_in_the_history() -> None:
    assert not Columns(measures=("process_bytes",)).counts(is_step=True)
    assert not Columns(measures=("step_s",), shared=("loss",)).counts(is_step=False)
    assert Columns(measures=("step_s",), shared=("loss",)).counts(is_step=True)
    assert Columns(own=("loss",)).counts(is_step=False)


def test_run_stores_the_death_of_a_rank(cluster: nbdist.Cluster) -> None:
    """This test must be the last of the module, because it kills a worker of the cluster."""
    pid = cluster.workers()[1].pid
    cell = "import time\nreport(loss=1.0)\ntime.sleep(60)"
    deliver, killed = cluster._worker_group.receiver.subscribers.deliver, []

    def intercept(record: AnyEvent) -> None:
        deliver(record)
        if isinstance(record, Rows) and record.rank == 1 and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    cluster._worker_group.receiver.subscribers.deliver = intercept
    with pytest.raises(nbdist.WorkerError, match=r"rank 1@.* died"):
        cluster.run(cell)
    state = latest(cluster).state()
    assert state.status == "failed"
    assert [w.status for w in state.workers if w.rank == 1] == ["dead"]


def test_recovery_is_stored_before_the_replacing_rows(tmp_path: Path) -> None:
    request = CellRequest(number=1, source="", label=1, strategy=None, awaits=False)
    workers = [
        WorkerState(rank=rank, host="here", pid=10 + rank, versions={}, devices=())
        for rank in (0, 1)
    ]
    run = live_run.begin(request, "%%dist_run", [""], workers, Settings(runs_folder=str(tmp_path)))
    send(run, losses(1, 7))
    run.lost([1])
    run.recovering("rank 1 died in the cell")
    (stored,) = stored_runs(tmp_path)
    assert [len(table) for table in reports(stored)] == [7], (
        "a recovery first stores all rows, because the notebook may be killed"
    )
    state = stored.state()
    assert (state.recovering, state.recoveries) == ("rank 1 died in the cell", ())
    assert [worker.status for worker in state.workers] == ["running", "dead"]
    send(run, losses(5, 9, lost_s=1.6))
    time.sleep(live_run.FLUSH_INTERVAL_S)
    run.tick()
    assert [len(table) for table in reports(stored)] == [7]
    run.recovered(recover(7, 4, time_s=2.0), {0: 20, 1: 21})
    state = stored.state()
    assert (state.recovering, state.recoveries) == ("", (recover(7, 4, time_s=2.0),))
    assert [(worker.pid, worker.status) for worker in state.workers] == [
        (20, "running"),
        (21, "running"),
    ]
    run.tick()
    assert [len(table) for table in reports(stored)] == [12]
    run.end("finished")


def test_failed_recovery_clears_the_recovering_state(tmp_path: Path) -> None:
    request = CellRequest(number=1, source="", label=1, strategy=None, awaits=False)
    run = live_run.begin(request, "%%dist_run", [""], [], Settings(runs_folder=str(tmp_path)))
    send(run, losses(1, 7))
    run.recovering("rank 1 died in the cell")
    run.end("failed", "rank 1 died in the cell")
    (stored,) = stored_runs(tmp_path)
    assert stored.state().recovering == ""
