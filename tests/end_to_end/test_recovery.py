"""Faults in runs with checkpoints: each has an outcome and a bound in seconds.

`make test` runs a few of them. `make chaos` runs all (`--full`), and random kills as well.
"""

from __future__ import annotations

import os
import signal
import time
from queue import Queue
from typing import TYPE_CHECKING

import numpy as np
import pytest

import nbdist
from nbdist.errors import CellError, PreemptedError
from nbdist.execution import alerts
from nbdist.records import Saving
from nbdist.utils.polling import repeat_until
from tests import clusters, training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.execution.alerts import Alert
    from nbdist.execution.result import Run

FULL = pytest.mark.full
RANKS, LAST = 3, training.STEPS
EVERY = 5
FAULT_STEPS = [1, 12, LAST]
"""The first step, one in between, the last step."""

TIMEOUT_S = 120.0
"""Bound of a run in seconds. Its checkpoints wait for a disk that other programs may use."""

FAULT = """
def at(step):
    time.sleep({pace_s})
    mark = {mark!r}
    if rank == {rank} and step == {step} and not os.path.exists(mark):
        open(mark, "w").close()
        {action}
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FREEZE = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISE = "raise ValueError('a bug of the user')"
HANG = "time.sleep(600)"
PREEMPT = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.fixture(scope="module")
def cluster(form: training.Form) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=RANKS, framework=form.framework) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: nbdist.Cluster, form: training.Form) -> str:
    """Digest of the state after an undisturbed training."""
    cluster.run(form.setup, strategy=form.strategy)
    form.run(cluster, data="batches")
    return form.digest_of(cluster)


class Trial:
    """Training with one injected fault."""

    def __init__(self, cluster: nbdist.Cluster, form: training.Form, folder: Path) -> None:
        self.cluster = cluster
        self.form = form
        self.folder = folder / "kept"
        self.mark = folder / "mark"
        self.saving = Saving(folder=str(self.folder), every_steps=EVERY, keep=2)
        cluster.run(form.setup, strategy=form.strategy)

    def fault(self, action: str, rank: int, step: int, pace_s: float = 0.0) -> None:
        """Let the rank run the action once before the step, and pause before each step."""
        source = FAULT.format(
            mark=str(self.mark), rank=rank, step=step, action=action, pace_s=pace_s
        )
        self.cluster.run(source)

    def run(self, **options: object) -> Run:
        started = time.monotonic()
        run = self.form.run(self.cluster, data="batches", saving=self.saving, **options)
        assert time.monotonic() - started < TIMEOUT_S
        return run

    def check(self, run: Run, undisturbed: str, recoveries: int = 1) -> None:
        """Check the number of recoveries and that the final bits are the undisturbed ones."""
        assert len(run.recoveries) == recoveries
        assert self.form.digest_of(self.cluster) == undisturbed
        assert not list(self.folder.glob(".*.part-*"))
        assert np.isfinite(run.loss).all()


@pytest.fixture
def trial(cluster: nbdist.Cluster, form: training.Form, undisturbed: str, tmp_path: Path) -> Trial:
    return Trial(cluster, form, tmp_path)


@training.forms("pjrt step")  # test_shrink.py covers a recovery under mirrored
@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (RANKS - 1, 12),
        pytest.param(0, 17, marks=FULL),
        pytest.param(0, 1, marks=FULL),
        pytest.param(RANKS - 1, 1, marks=FULL),
        pytest.param(0, LAST, marks=FULL),
        pytest.param(RANKS - 1, LAST, marks=FULL),
    ],
)
def test_killed_rank_is_replaced(
    trial: Trial, undisturbed: str, rank: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: Queue[Alert] = Queue()
    monkeypatch.setattr(alerts, "_functions", {})
    nbdist.on_alert(received.put)
    trial.fault(KILL, rank, step)
    run = trial.run()
    trial.check(run, undisturbed)
    events = {received.get(timeout=TIMEOUT_S).event for _ in range(2)}
    assert events == {"recovered", "finished"}
    assert rank in run.recoveries[0].ranks  # ranks that do not respond in time are replaced too
    assert run.recoveries[0].step <= step


LOSE_REPORTS = """
import threading, zmq
from pathlib import Path
from nbdist.utils.polling import repeat_until
from nbdist.worker.checkpoint.folder import steps_in
send = zmq.Socket.send_multipart
def lose(socket, frames, *args, **options):
    if threading.current_thread().name != "nbdist-reporter":
        return send(socket, frames, *args, **options)
def at(step):
    if rank != {rank} or os.path.exists({mark!r}):
        return
    if step == 9:
        zmq.Socket.send_multipart = lose
    elif step == 12:
        assert repeat_until(lambda: 10 in steps_in(Path({folder!r})), 60)
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Double of a host that fails with its last packets: the rank's later reports are lost."""


@training.forms("pjrt step")
def test_lost_reports_of_saved_steps_are_repeated(trial: Trial, undisturbed: str) -> None:
    names = {"rank": RANKS - 1, "mark": str(trial.mark), "folder": str(trial.folder)}
    trial.cluster.run(LOSE_REPORTS.format(**names))
    run = trial.run()
    assert [recovery.step for recovery in run.recoveries] == [10]
    trial.check(run, undisturbed)


@FULL  # test_fail_fast.py detects a frozen rank
@training.forms("pjrt step")
@pytest.mark.parametrize(
    ("rank", "step"),
    [(0, 12), *(pytest.param(r, s, marks=FULL) for r, s in ((RANKS - 1, 1), (0, 24)))],
)
def test_frozen_rank_is_replaced(trial: Trial, undisturbed: str, rank: int, step: int) -> None:
    trial.fault(FREEZE, rank, step)
    trial.check(trial.run(), undisturbed)


@training.forms("pjrt step")
@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (0, 1),  # test_fail_fast.py covers other steps
        *(pytest.param(0, step, marks=FULL) for step in FAULT_STEPS[1:]),
        *(pytest.param(RANKS - 1, step, marks=FULL) for step in FAULT_STEPS),
    ],
)
def test_hung_rank_is_replaced(trial: Trial, undisturbed: str, rank: int, step: int) -> None:
    trial.fault(HANG, rank, step)
    trial.check(trial.run(hang_after_s=3), undisturbed)


@training.forms("pjrt step")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="frozen", marks=FULL),
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=FULL), RANKS - 1])
def test_rank_lost_between_cells_is_replaced(
    trial: Trial, undisturbed: str, rank: int, number: signal.Signals
) -> None:
    engines = trial.cluster._worker_group.engines
    os.kill(engines.pids()[rank], number)
    assert repeat_until(lambda: rank in engines.dead() or engines.is_frozen(rank), TIMEOUT_S)
    run = trial.run()
    trial.check(run, undisturbed)
    assert run.recoveries[0].step == 0


@FULL  # test_session.py covers errors, and test_step_objects.py a resumed run
@training.forms("pjrt step")
@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (RANKS - 1, 12),
        *(pytest.param(r, s, marks=FULL) for r, s in ((0, 12), (RANKS - 1, 1), (0, LAST))),
    ],
)
def test_bug_of_the_user_is_not_recovered(
    trial: Trial, undisturbed: str, rank: int, step: int
) -> None:
    """The cell fails, and the next cell with `--resume` continues from the checkpoint."""
    trial.fault(RAISE, rank, step)
    with pytest.raises(CellError, match=f"ValueError on rank {rank}@"):
        trial.run()
    trial.cluster.run(trial.form.setup, strategy=trial.form.strategy)
    trial.saving = Saving(folder=str(trial.folder), every_steps=EVERY, resume=True)
    trial.check(trial.run(), undisturbed, recoveries=0)


@training.forms("pjrt step")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=FULL), RANKS - 1])
@pytest.mark.full
def test_preempted_rank_makes_all_ranks_save(trial: Trial, undisturbed: str, rank: int) -> None:
    """All ranks save the same step after the signal, and the rerun continues from it."""
    trial.fault(PREEMPT, rank, 12, pace_s=0.08)
    with pytest.raises(PreemptedError, match=f"rank {rank}@.*SIGTERM.*--resume"):
        trial.run()
    assert max(int(path.name[5:]) for path in trial.folder.glob("step-*")) >= 12
    trial.saving = Saving(folder=str(trial.folder), every_steps=EVERY, resume=True)
    trial.cluster.restart()
    trial.cluster.run(trial.form.setup, strategy=trial.form.strategy)
    trial.check(trial.run(), undisturbed, recoveries=0)


@training.forms("pjrt step")
@pytest.mark.parametrize(
    ("rank", "save"),
    [
        (0, 15),
        *(pytest.param(0, save, marks=FULL) for save in (5, LAST)),
        *(pytest.param(RANKS - 1, save, marks=FULL) for save in (5, 15, LAST)),
    ],
)
def test_death_during_a_save_keeps_the_previous_checkpoint(
    trial: Trial, undisturbed: str, rank: int, save: int
) -> None:
    """The rank kills itself as soon as it starts to write the next checkpoint."""
    part = str(trial.folder / f".step-{save:08}.part-*" / f"rank-{rank}.msgpack")
    trial.cluster.run(
        f"import glob, threading\ndef die():\n    while not glob.glob({part!r}):\n"
        f"        time.sleep(0.0002)\n    {KILL}"
    )
    trial.fault("threading.Thread(target=die, daemon=True).start()", rank, save - 3)
    run = trial.run()
    trial.check(run, undisturbed)
    assert run.recoveries[0].step in (*range(0, save, EVERY)[-1:], save)


@FULL  # test_checkpoint_faults.py limits the file size once
@training.forms()
@pytest.mark.parametrize("step", FAULT_STEPS)
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_full_disk_does_not_stop_the_run(
    trial: Trial, undisturbed: str, rank: int, step: int
) -> None:
    """The previous checkpoint stays the newest when a rank cannot write any more."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, {})"
    trial.cluster.run("import resource")
    trial.fault(limit.format("(100, resource.RLIM_INFINITY)"), rank, step)
    run = trial.run()
    trial.cluster.run(limit.format("2 * (resource.RLIM_INFINITY,)"))
    assert not run.recoveries
    assert trial.form.digest_of(trial.cluster) == undisturbed
    newest = max((int(path.name[5:]) for path in trial.folder.glob("step-*")), default=0)
    assert newest in range(0, step, EVERY)[-2:]  # the last one may be incomplete
    assert any("was not saved" in note.text for note in run.notes)


@pytest.fixture(scope="module")
def own_cluster(form: training.Form) -> Iterator[nbdist.Cluster]:
    """Cluster whose fork server and controller the tests may kill."""
    with nbdist.Cluster(hosts=RANKS, framework=form.framework) as running:
        yield running


@training.forms()
@FULL  # each test restarts the cluster; test_cluster.py kills both parts
@pytest.mark.parametrize("step", FAULT_STEPS)
@pytest.mark.parametrize("part", ["controller", "fork server"])
def test_run_continues_without_controller_or_fork_server(
    own_cluster: nbdist.Cluster,
    form: training.Form,
    undisturbed: str,
    tmp_path: Path,
    part: str,
    step: int,
) -> None:
    """Cells bypass the controller; without the fork server, a recovery restarts all workers."""
    if not own_cluster.inspection.is_whole:  # the previous test killed a part
        own_cluster.restart()
    trial = Trial(own_cluster, form, tmp_path)
    engines = own_cluster._worker_group.engines
    pid = engines.fleet.home.state.pid if part == "fork server" else engines.controller.pids[0]
    wait = (
        "time.sleep(60)" if part == "fork server" else "None"
    )  # the rank dies with the fork server, also in the last step
    trial.fault(f"[os.kill({pid}, signal.SIGKILL), {wait}]", 0, step)
    trial.check(trial.run(), undisturbed, recoveries=int(part == "fork server"))


@FULL  # imports TensorFlow again
def test_recovery_in_place_counts_once_with_both_frameworks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recovery aborts TensorFlow's collectives too; the JAX run does not need them."""
    with nbdist.Cluster(hosts=RANKS, spares=1) as both:
        trial = Trial(both, training.FORMS["pjrt step"], tmp_path)
        trial.fault(KILL, 1, 12)
        recoveries = trial.run().recoveries
        assert [recover.ranks for recover in recoveries] == [(1,)]
        both.run("import tensorflow as tf\nstrategy.num_replicas_in_sync", strategy="mirrored")
        assert "without the variables and datasets of TensorFlow" in capsys.readouterr().out
