"""Clusters on a real Slurm: queue, training, preemption, requeue, release."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import nbdist
from nbdist.cluster.schedulers.allocations import RENDEZVOUS_SOCKET
from nbdist.errors import PreemptedError, StartError, UsageError, WorkerError
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from tests import exact
from tests.exact import STEP, after, losses, setup, steps_of
from tests.kernels import Kernel
from tests.netns import Hosts
from tests.schedulers import cancelling, output_reader
from tests.slurm import Slurm, needs_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [needs_slurm, pytest.mark.usefixtures("own_folders")]

RANK_AND_HOST = "import socket\n(rank, socket.gethostname())"
STEPS = 400
LOSSES = losses(STEPS)
END_S = 30.0
CANCEL_S = 60.0


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Hosts, Slurm]]:
    with Hosts(3) as hosts, Slurm(hosts) as slurm:
        yield hosts, slurm
        assert repeat_until(lambda: not cancelling(), CANCEL_S), "all cancellations end"


@pytest.fixture
def slurm(network: tuple[Hosts, Slurm], monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Slurm with idle hosts; after the test no job and no nbdist process may be left."""
    hosts, slurm = network
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    assert repeat_until(lambda: slurm.idle() == len(hosts.each), 30)
    yield slurm
    assert repeat_until(lambda: not slurm.jobs(), END_S), slurm.jobs()
    for host in hosts.each:
        assert repeat_until(lambda host=host: not nbdist_processes(host), END_S), nbdist_processes(
            host
        )


@pytest.fixture
def hosts(network: tuple[Hosts, Slurm]) -> Hosts:
    return network[0]


@pytest.fixture
def batch(hosts: Hosts) -> nbdist.Batch:
    return nbdist.Batch(launcher="slurm", listen=hosts.address, time="30", queue="main")


def nbdist_processes(host: object) -> list[str]:
    lines = [" ".join(process.cmdline()) for process in host.processes()]  # type: ignore[attr-defined]
    return [line for line in lines if "nbdist.cluster" in line]


def test_three_hosts_train_and_restart(
    slurm: Slurm, hosts: Hosts, batch: nbdist.Batch, tmp_path: Path
) -> None:
    with nbdist.Cluster(3, batch=batch, framework="jax") as cluster:
        answers = cluster.run(RANK_AND_HOST).results
        assert answers == {rank: str((rank, name)) for rank, name in enumerate(hosts.names)}
        assert list(slurm.jobs().values()) == ["RUNNING"]
        assert len(set(cluster.run("import os\nos.environ['SLURM_JOB_ID']").results.values())) == 1
        np.testing.assert_array_equal(exact.train(cluster, tmp_path, STEPS).loss, LOSSES)
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}
        assert list(slurm.jobs()) == [job_of(cluster)], "the restart keeps the job"
        folder = cluster._folder
    assert not folder.exists()


def job_of(cluster: nbdist.Cluster) -> str:
    rendezvous = cluster._worker_group.engines.fleet._rendezvous
    assert rendezvous is not None
    return rendezvous.job(0).split()[-1]


@pytest.mark.full  # other launchers cover the same path
def test_tensorflow_trains_on_two_hosts(slurm: Slurm, batch: nbdist.Batch) -> None:
    model = (
        "import keras, numpy as np\nkeras.utils.set_random_seed(1)\n"
        "m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "m.compile('sgd', 'mse')\n"
        "x = np.arange(256, dtype='float32').reshape(64, 4) / 256\n"
        "m.fit(x, x.sum(1), epochs=2, batch_size=16, verbose=0, shuffle=False).history['loss']"
    )
    with nbdist.Cluster(2, batch=batch, framework="tensorflow") as cluster:
        across = cluster.run(model).results
    with nbdist.Cluster(2, framework="tensorflow") as cluster:
        assert cluster.run(model).results == across
    assert slurm.idle() >= 1


@pytest.mark.full
def test_queue_state_is_shown_while_the_job_waits(
    slurm: Slurm, batch: nbdist.Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = slurm.occupy(3)
    assert repeat_until(lambda: slurm.jobs().get(other) == "RUNNING", END_S)
    read_output = output_reader(capsys)

    def release() -> None:
        assert repeat_until(lambda: len(slurm.jobs()) == 2, END_S)
        assert repeat_until(lambda: "pending (Resources" in read_output(), END_S)
        slurm.cancel(other)

    thread = threading.Thread(target=release)
    thread.start()
    with nbdist.Cluster(2, batch=batch, framework="none") as cluster:
        thread.join()
        assert cluster.world_size == 2
    assert "hosts reached: Slurm job" in read_output()


def test_interrupt_cancels_the_job(slurm: Slurm, batch: nbdist.Batch) -> None:
    other = slurm.occupy(3)
    assert repeat_until(lambda: slurm.jobs().get(other) == "RUNNING", END_S)
    try:
        with Kernel() as kernel:
            kernel.run("%load_ext nbdist").check()
            options = f"%dist_start 2 hosts --launcher slurm --listen {batch.listen} -f jax"
            request = kernel.send(options)
            assert repeat_until(lambda: len(slurm.jobs()) == 2, 30)
            kernel.manager.interrupt_kernel()
            assert kernel.collect(request).ename == "CellInterrupt"
            assert repeat_until(lambda: list(slurm.jobs()) == [other], END_S)
    finally:
        slurm.cancel(other)


@pytest.mark.full
def test_queue_timeout_cancels_the_job(
    slurm: Slurm, batch: nbdist.Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_QUEUE_WAIT_S", "2")
    other = slurm.occupy(3)
    assert repeat_until(lambda: slurm.jobs().get(other) == "RUNNING", END_S)
    try:
        with pytest.raises(
            StartError, match=r"was queued for 2 s \(NBDIST_QUEUE_WAIT_S\): PENDING"
        ):
            nbdist.Cluster(2, batch=batch, framework="none")
        assert repeat_until(lambda: list(slurm.jobs()) == [other], END_S)
    finally:
        slurm.cancel(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queue": "nowhere"}, "invalid partition specified: nowhere"),
        ({"options": ("--no-such-option",)}, "unrecognized option '--no-such-option'"),
        ({"options": ("--constraint=banana",)}, "Invalid feature specification"),
        ({"gpus": 8}, "Invalid generic resource"),
        pytest.param(
            {"python": "/no/such/python"},
            r"(?s)FAILED.*No such file or directory",
            marks=pytest.mark.full,
        ),
        ({"listen": "192.0.2.7"}, r"(?s)the rendezvous process failed to start:.*192\.0\.2\.7"),
    ],
)
def test_refused_submission_is_reported(
    slurm: Slurm, batch: nbdist.Batch, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        nbdist.Cluster(2, batch=msgspec.structs.replace(batch, **changes), framework="none")
    assert not slurm.jobs() or repeat_until(lambda: not slurm.jobs(), END_S)


def test_request_for_too_many_hosts_is_refused(slurm: Slurm, batch: nbdist.Batch) -> None:
    with pytest.raises(StartError, match=r"provides no hosts: PENDING \(PartitionConfig\)"):
        nbdist.Cluster(9, batch=batch, framework="none")
    assert repeat_until(lambda: not slurm.jobs(), END_S)


@pytest.mark.full  # a quarter of a minute
def test_cancelled_job_preempts_the_cell(slurm: Slurm, batch: nbdist.Batch) -> None:
    """Slurm sends SIGTERM to the workers, and later kills those that are left."""
    with nbdist.Cluster(2, batch=batch, framework="none") as cluster:
        job = job_of(cluster)
        canceller = threading.Timer(1, slurm.cancel, [job])
        canceller.start()
        with pytest.raises(PreemptedError, match="received SIGTERM"):
            cluster.run("import time\nfor _ in range(600): time.sleep(0.1)")
        canceller.join()
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}
        assert job_of(cluster) != job


@pytest.mark.full  # other launchers cover the same path
def test_job_state_of_lost_hosts_is_reported(
    slurm: Slurm, hosts: Hosts, batch: nbdist.Batch
) -> None:
    with nbdist.Cluster(2, batch=batch, framework="none") as cluster:
        job = job_of(cluster)

        def kill() -> None:
            for process in itertools.chain(*(host.processes() for host in hosts.each)):
                if "nbdist.cluster.schedulers.dial_in" in " ".join(process.cmdline()):
                    process.kill()

        killer = threading.Timer(1, kill)
        killer.start()
        with pytest.raises(WorkerError, match=rf"(?s)lost with its host.*; Slurm job {job}: "):
            cluster.run("import time\nfor _ in range(600): time.sleep(0.1)")
        killer.join()


@pytest.mark.full
def test_requeued_job_is_recovered(slurm: Slurm, batch: nbdist.Batch, tmp_path: Path) -> None:
    """A requeued job keeps its number, like a preempted one, and starts again later."""
    with nbdist.Cluster(2, batch=batch, framework="jax") as cluster:
        job = job_of(cluster)

        def requeue() -> None:
            slurm.control("requeue", job)
            assert repeat_until(lambda: slurm.jobs().get(job) == "PENDING", END_S)
            slurm.control(
                "update", f"JobId={job}", "StartTime=now"
            )  # the default is two minutes later

        run = exact.train(cluster, tmp_path, STEPS, meanwhile=requeue)
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert len(run.recoveries) == 1
        assert list(slurm.jobs()) == [job]


@pytest.mark.full  # half a minute
def test_dead_host_is_replaced_by_another(
    slurm: Slurm, hosts: Hosts, batch: nbdist.Batch, tmp_path: Path
) -> None:
    exclusive = msgspec.structs.replace(batch, options=("--exclusive",))
    with nbdist.Cluster(2, batch=exclusive, framework="jax") as cluster:
        before = [worker.host for worker in cluster.workers()]
        rank = int(before[0] == hosts.names[0])  # the other host runs slurmctld
        victim = hosts.each[hosts.names.index(before[rank])]
        try:
            run = exact.train(cluster, tmp_path, STEPS, meanwhile=victim.power_off)
        finally:
            victim.power_on()
            slurm.power_on(victim)
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert len(run.recoveries) == 1
        now = [worker.host for worker in cluster.workers()]
        assert now[1 - rank] == before[1 - rank]
        assert now[rank] not in before
        assert len(slurm.jobs()) == 2, "the new host has its own job"


def test_preemption_saves_a_checkpoint(slurm: Slurm, batch: nbdist.Batch, tmp_path: Path) -> None:
    """After SIGTERM from Slurm, all ranks stop at the same step and save it."""
    with nbdist.Cluster(2, batch=batch, framework="jax") as cluster:
        canceller = after(tmp_path, 60, lambda: slurm.cancel(job_of(cluster)))
        try:
            with pytest.raises(PreemptedError, match="received SIGTERM"):
                exact.train(cluster, tmp_path, 20_000 // 4)
        finally:
            canceller.join()
        first = cluster.last_run
        assert first is not None
        cluster.restart()
        last = exact.train(cluster, tmp_path, len(first.loss) + 5, resume=True)
        assert len(last.loss) == 5, "the run resumes at the step at which all ranks stopped"
        whole = np.concatenate([first.loss, last.loss])
        np.testing.assert_array_equal(whole, losses(len(whole)))
    assert repeat_until(lambda: not slurm.jobs(), END_S)


@pytest.mark.full  # test_resize.py covers hosts over ssh
def test_resize_adds_and_releases_hosts(slurm: Slurm, batch: nbdist.Batch) -> None:
    with nbdist.Cluster(2, batch=batch, framework="none") as cluster:
        first = job_of(cluster)
        cluster.resize(3)
        assert cluster.run("world_size").results == dict.fromkeys(range(3), "3")
        assert len(slurm.jobs()) == 2, "the new host has its own job"
        with pytest.raises(UsageError, match=r"provides no hosts: PENDING \(PartitionConfig\)"):
            cluster.resize(9)
        assert repeat_until(lambda: len(slurm.jobs()) == 2, END_S), (
            "the refused job leaves the queue"
        )
        assert cluster.run("world_size").results == dict.fromkeys(range(3), "3"), (
            "the refused resize changes nothing"
        )
        cluster.resize(1)
        assert cluster.run("rank").results == {0: "0"}
        assert repeat_until(lambda: list(slurm.jobs()) == [first], END_S)


@pytest.mark.full
def test_new_notebook_continues_after_a_kill(
    slurm: Slurm, batch: nbdist.Batch, tmp_path: Path
) -> None:
    with Kernel() as kernel:
        options = f"--launcher slurm --listen {batch.listen} --time 30 --framework jax"
        kernel.run(f"%load_ext nbdist\n%dist_start 2 hosts {options}").check()
        kernel.run(f"%%dist_run\n{setup(4)}").check()
        saved = f"--checkpoint {tmp_path / 'saved'} --save-every 20 --batch 4 --steps {STEPS}"
        kernel.send(f"%%dist_run --data xs {saved}\n{STEP}")
        assert repeat_until(lambda: steps_of(tmp_path) > 60, 60)
        os.kill(stored_runs(tmp_path / "runs")[0].state().writer.pid, signal.SIGKILL)
    with nbdist.attach() as cluster:
        run = cluster.follow()
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert not run.recoveries
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}
        assert len(slurm.jobs()) == 1


@pytest.mark.full
def test_killed_notebook_leaves_no_job(slurm: Slurm, batch: nbdist.Batch) -> None:
    with Kernel() as kernel:
        kernel.run("import os\nos.environ['NBDIST_RETURN_GRACE_S'] = '1'\n%load_ext nbdist").check()
        options = f"--launcher slurm --listen {batch.listen} --time 30 -f jax"
        kernel.run(f"%dist_start 2 hosts {options}").check()
        assert len(slurm.jobs()) == 1
        kernel.manager.provisioner.process.kill()  # type: ignore[union-attr]
        assert repeat_until(lambda: not slurm.jobs(), END_S)


@pytest.mark.full  # other launchers cover the same path
def test_restart_replaces_a_dead_rendezvous_process(slurm: Slurm, batch: nbdist.Batch) -> None:
    """Workers end when the rendezvous process dies, and a restart creates a new one."""
    with nbdist.Cluster(2, batch=batch, framework="none") as cluster:
        rendezvous = cluster._worker_group.engines.fleet._rendezvous
        assert rendezvous is not None
        os.kill(rendezvous.ask("open", place=0)["pid"], signal.SIGKILL)
        engines = cluster._worker_group.engines
        assert repeat_until(lambda: len(engines.dead()) == 2, 20)
        started = time.monotonic()
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}
        assert time.monotonic() - started < 60
        assert (cluster._folder / RENDEZVOUS_SOCKET).exists()
        assert repeat_until(lambda: len(slurm.jobs()) == 1, 90), "the old job ends itself"
