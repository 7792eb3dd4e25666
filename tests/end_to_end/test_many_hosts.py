"""Workers on other hosts over ssh: start, training, network faults, host failures, stop."""

from __future__ import annotations

import ast
import os
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import nbdist
from nbdist.cluster.forkserver.control_socket import SILENCE_S
from nbdist.cluster.remote_host.remote_forkserver import LOST_S
from nbdist.errors import StartError, WorkerError
from nbdist.records import Host
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from tests import exact
from tests.exact import STEP, after, losses, setup, steps_of
from tests.kernels import Kernel
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests import netns

pytestmark = [needs_hosts, pytest.mark.usefixtures("own_folders")]

RANK_AND_HOST = "import socket\n(rank, socket.gethostname())"
STEPS = 400
LOSSES = losses(STEPS)

SLOW = "import time; time.sleep(0.02)\n"
END_S = 30.0


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(4) as network:
        yield network


@pytest.fixture
def hosts(network: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts that are powered on and connected, and that run no nbdist process after the test."""
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    yield network
    for host in network.each:
        assert repeat_until(lambda host=host: not nbdist_processes(host), END_S), (
            host.name,
            nbdist_processes(host),
        )


def nbdist_processes(host: netns.Host) -> list[str]:
    """Return the command lines of all processes on the host except sshd and its parents."""
    return [
        " ".join(process.cmdline())
        for process in host.processes()
        if "sshd" not in process.name() and process.name() not in ("unshare", "ip", "sh")
    ]


def train(cluster: nbdist.Cluster, folder: Path, **saving: object) -> nbdist.Run:
    return exact.train(cluster, folder, STEPS, **saving)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_hosts_train_and_leave_no_processes(hosts: Hosts, tmp_path: Path, count: int) -> None:
    names, each = hosts.names[:count], hosts.each[:count]
    with nbdist.Cluster(hosts=names, framework="jax") as cluster:
        answers = cluster.run(RANK_AND_HOST).results
        assert answers == {rank: str((rank, name)) for rank, name in enumerate(names)}
        run = train(cluster, tmp_path)
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert {w.host: w.memory_bytes > 1e8 for w in cluster.workers()} == dict.fromkeys(
            names, True
        )
        listening = [host.listening() for host in each]
        folders = [
            location.folder for location in cluster._worker_group.engines.fleet.locations.values()
        ]
    for host, listeners in zip(each, listening, strict=True):
        others = {port for address, port in listeners if address != "127.0.0.1"} - {22}
        assert len(others) == 1, f"gloo is the only listener besides sshd: {listeners}"
        assert {address for address, _ in listeners} == {host.address, "127.0.0.1"}
        local = {port for address, port in listeners if address == "127.0.0.1"}
        assert len(local) == 1, (
            f"ipykernel listens once, for the output of child processes: {listeners}"
        )
    assert not any(map(os.path.exists, folders))


@pytest.mark.full  # a quarter of a minute
def test_tensorflow_trains_across_hosts(hosts: Hosts) -> None:
    model = (
        "import keras, numpy as np\nkeras.utils.set_random_seed(1)\n"
        "m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "m.compile('sgd', 'mse')\n"
        "x = np.arange(256, dtype='float32').reshape(64, 4) / 256\n"
        "m.fit(x, x.sum(1), epochs=2, batch_size=16, verbose=0, shuffle=False).history['loss']"
    )
    with nbdist.Cluster(hosts=hosts.names[:2], framework="tensorflow") as cluster:
        addresses = cluster.run("import json, os\njson.loads(os.environ['TF_CONFIG'])['cluster']")
        assert all(host.address in str(addresses.results) for host in hosts.each[:2])
        across = cluster.run(model).results
        assert across[0] == across[1]
        break_connection(hosts.each[1])  # nbdist must restore the whole tunnel
        fleet = cluster._worker_group.engines.fleet
        assert repeat_until(lambda: bool(fleet.disconnected_hosts()), END_S)
        assert repeat_until(lambda: not fleet.disconnected_hosts(), 10)
        assert cluster.run(model).results == across
    with nbdist.Cluster(hosts=2, framework="tensorflow") as cluster:
        assert cluster.run(model).results == across


@pytest.mark.full
def test_local_and_remote_workers_train_together(hosts: Hosts, tmp_path: Path) -> None:
    with nbdist.Cluster(hosts=["localhost", hosts.names[0]], framework="jax") as cluster:
        assert len({w.host for w in cluster.workers()}) == 2
        np.testing.assert_array_equal(train(cluster, tmp_path).loss, LOSSES)


def test_options_of_a_host_apply_to_both_of_its_workers(hosts: Hosts, tmp_path: Path) -> None:
    host = Host(name=hosts.names[0], devices=2, env={"SAID": "yes"}, folder=str(tmp_path))
    with nbdist.Cluster(hosts=[host, host], framework="jax") as cluster:
        results = cluster.run("import os, jax\nos.environ['SAID'], os.getcwd(), jax.device_count()")
        values = {ast.literal_eval(result) for result in results.results.values()}
        assert values == {("yes", str(tmp_path), 4)}
        assert len(cluster._worker_group.engines.fleet.locations) == 1


@pytest.mark.parametrize("min_hosts", [0, 2])
def test_unreachable_host_is_refused_or_left_out(hosts: Hosts, min_hosts: int) -> None:
    first, unreachable = hosts.names[:2]
    hosts.each[1].power_off()
    try:
        if min_hosts:
            with nbdist.Cluster(
                hosts=[first, unreachable, hosts.names[2]], framework="jax", min_hosts=2
            ) as cluster:
                assert [w.host for w in cluster.workers()] == [first, hosts.names[2]]
        else:
            started = time.monotonic()
            with pytest.raises(StartError, match=rf"(?s){unreachable}: .*--min-hosts 1"):
                nbdist.Cluster(hosts=[first, unreachable], framework="jax")
            assert time.monotonic() - started < 60
    finally:
        hosts.each[1].power_on()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (Host(python="/no/such/python"), "/no/such/python does not exist: use --python PATH"),
        (Host(python="/usr/bin/env"), "/usr/bin/env failed there"),
        (Host(python="/bin/echo"), "instead of the fork server's location"),
        (Host(user="nobody"), "[Pp]ermission denied"),
    ],
)
def test_wrongly_configured_host_is_reported(hosts: Hosts, host: Host, message: str) -> None:
    import msgspec

    faulty_host = msgspec.structs.replace(host, name=hosts.names[0])
    with pytest.raises(StartError, match=message):
        nbdist.Cluster(hosts=[faulty_host], framework="jax")


def test_unknown_host_key_is_reported(hosts: Hosts, tmp_path: Path) -> None:
    text = hosts.ssh_config.read_text().replace("known_hosts", "no_known_hosts")
    other = tmp_path / "ssh_config"
    other.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_SSH_CONFIG", str(other))
        with pytest.raises(StartError, match="Host key verification failed"):
            nbdist.Cluster(hosts=hosts.names[:1], framework="jax")


@pytest.mark.full
def test_short_network_loss_needs_no_recovery(hosts: Hosts, tmp_path: Path) -> None:
    """The run continues without a recovery."""
    host = hosts.each[1]

    def disconnect() -> None:
        assert steps_of(tmp_path) < STEPS
        host.cut()
        step_counts.append(steps_of(tmp_path))
        time.sleep(2)
        step_counts.append(steps_of(tmp_path))
        host.mend()

    step_counts: list[int] = []
    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax") as cluster:
        cutter = after(tmp_path, 60, disconnect)
        run = train(cluster, tmp_path)
        cutter.join()
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert not run.recoveries
        before, later = step_counts
        assert later < 2 * STEPS, "the run paused while the cable was disconnected"
        assert later - before < STEPS


def break_connection(host: netns.Host) -> None:
    connections = [p for p in host.processes() if "notty" in command_line(p)]
    assert connections
    for process in connections:
        process.kill()


def test_broken_connection_is_restored(hosts: Hosts, tmp_path: Path) -> None:
    """The test kills sshd. JAX ends a process that loses its coordination service."""
    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax") as cluster:
        run = train(cluster, tmp_path, meanwhile=lambda: break_connection(hosts.each[1]))
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert [recover.ranks for recover in run.recoveries] == [(1,)]
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}


def test_dead_worker_on_another_host_is_replaced(hosts: Hosts, tmp_path: Path) -> None:
    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax") as cluster:
        victim = [
            p
            for p in hosts.each[1].processes()
            if "-m nbdist.cluster.forkserver.remote_start" in command_line(p)
        ]
        newest = max(victim, key=lambda process: process.create_time())
        run = train(cluster, tmp_path, meanwhile=newest.kill)
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert len(run.recoveries) == 1


def command_line(process: object) -> str:
    return " ".join(process.cmdline())  # type: ignore[attr-defined]


@pytest.mark.full
def test_spare_on_the_same_host_replaces_a_worker(hosts: Hosts, tmp_path: Path) -> None:
    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax", spares=2) as cluster:
        engines = cluster._worker_group.engines
        assert engines.can_replace([0, 1])
        assert not engines.can_replace([1, 1])
        first = cluster.run("import os\nos.getpid()").results
        run = train(
            cluster, tmp_path, meanwhile=lambda: engines.fleet.kill([engines._names[1]], 10)
        )
        np.testing.assert_array_equal(run.loss, LOSSES)
        now = cluster.run("import os\nos.getpid()").results
        lost = {rank for recover in run.recoveries for rank in recover.ranks}
        assert 1 in lost
        assert {rank for rank in now if now[rank] != first[rank]} == lost
        assert cluster.run(RANK_AND_HOST).results[1] == str((1, hosts.names[1]))


@pytest.mark.full
def test_other_options_of_the_ssh_configuration_are_overridden(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra_options = (
        "\nHost *\n  ControlMaster auto\n  ControlPersist 10m\n  RequestTTY force\n"
        "  RemoteCommand true\n  LocalForward 48888 127.0.0.1:9\n"
        "  RemoteForward 48889 127.0.0.1:9\n"
    )
    config = tmp_path / "ssh_config"
    config.write_text(hosts.ssh_config.read_text() + extra_options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBDIST_SSH_CONFIG", "ssh_config")
    with nbdist.Cluster(hosts=hosts.names[:1], framework="jax") as cluster:
        assert cluster.run("rank").results == {0: "0"}
        assert 48889 not in {port for _, port in hosts.each[0].listening()}


@pytest.mark.full
def test_environment_and_folder_of_a_host_apply(hosts: Hosts, tmp_path: Path) -> None:
    """Variables are set before the import of a framework, also for local workers."""
    one = Host(name=hosts.names[0], env={"XLA_FLAGS": "--xla_force_host_platform_device_count=3"})
    with nbdist.Cluster(hosts=[one], framework="jax") as cluster:
        assert cluster.run("import jax\njax.local_device_count()").results == {0: "3"}
    local = Host(env={"SAID": "here"})
    with nbdist.Cluster(hosts=[local, Host(name=hosts.names[0])], framework="none") as cluster:
        results = cluster.run("import os\nos.environ.get('SAID', '')").results
        assert results == {0: "'here'", 1: "''"}
    with pytest.raises(StartError, match="folder /no/such/folder does not exist"):
        nbdist.Cluster(hosts=[Host(name=hosts.names[0], folder="/no/such/folder")])


def test_dead_host_is_left_out(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts.each[1]
    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax") as cluster:
        try:
            run = train(cluster, tmp_path, shrink=True, meanwhile=host.power_off)
        finally:
            host.power_on()
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert [recover.workers for recover in run.recoveries] == [1]
        assert cluster.world_size == 1
        cluster.restart()
        assert cluster.world_size == 2, "the restart includes the host again"
        assert cluster.run(RANK_AND_HOST).results[1] == str((1, host.name))


@pytest.mark.full  # differs from the shrink test only in the wait
def test_rebooting_host_is_awaited(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts.each[1]

    def reboot() -> None:
        host.power_off()
        time.sleep(3)
        host.power_on()

    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax") as cluster:
        run = train(cluster, tmp_path, meanwhile=reboot)
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert len(run.recoveries) == 1
        assert cluster.world_size == 2


@pytest.mark.full  # half a minute
def test_frozen_host_is_reported(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_RETURN_GRACE_S", "1")
    host = hosts.each[1]
    with nbdist.Cluster(hosts=hosts.names[:2], framework="jax") as cluster:
        host.freeze()
        try:
            with pytest.raises(WorkerError, match=rf"rank 1@{host.name} was lost with its host"):
                cluster.run("import time\nfor _ in range(600): time.sleep(0.1)")
        finally:
            host.thaw()


@pytest.mark.full
def test_new_notebook_continues_after_a_kill(hosts: Hosts, tmp_path: Path) -> None:
    """A detached runner follows the run over the same connections."""
    names = " ".join(hosts.names[:2])
    with Kernel() as kernel:
        kernel.run(f"%load_ext nbdist\n%dist_start {names} --framework jax").check()
        kernel.run(f"%%dist_run\n{setup(4)}").check()
        saved = f"--checkpoint {tmp_path / 'saved'} --save-every 20 --batch 4 --steps {STEPS}"
        kernel.send(f"%%dist_run --data xs {saved}\n{STEP}")
        assert repeat_until(lambda: steps_of(tmp_path) > 60, 60)
        owner = stored_runs(tmp_path / "runs")[0].state().writer.pid
        os.kill(owner, signal.SIGKILL)
    with nbdist.attach() as cluster:
        run = cluster.follow()
        np.testing.assert_array_equal(run.loss, LOSSES)
        assert not run.recoveries
        assert cluster.run("float(w.sum())").results == {0: str(LOSSES[-1]), 1: str(LOSSES[-1])}
        cluster.restart()
        assert cluster.run(RANK_AND_HOST).results[1] == str((1, hosts.names[1]))
        break_connection(hosts.each[1])
        fleet = cluster._worker_group.engines.fleet
        assert repeat_until(lambda: bool(fleet.disconnected_hosts()), END_S)
        assert repeat_until(lambda: not fleet.disconnected_hosts(), 10)
        cluster.restart()
        assert cluster.run(RANK_AND_HOST).results[1] == str((1, hosts.names[1]))


@pytest.mark.full
def test_ending_notebook_leaves_no_processes(hosts: Hosts) -> None:
    names = " ".join(hosts.names[:2])
    with Kernel() as kernel:
        kernel.run(f"%load_ext nbdist\n%dist_start {names} --framework jax").check()
        assert all(map(nbdist_processes, hosts.each[:2]))
    for host in hosts.each[:2]:
        assert repeat_until(lambda host=host: not nbdist_processes(host), END_S), nbdist_processes(
            host
        )


@pytest.mark.full  # half a minute
def test_workers_end_if_the_notebook_host_is_gone(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers end themselves if no notebook reconnects."""
    monkeypatch.setenv("NBDIST_RETURN_GRACE_S", "2")
    host = hosts.each[0]
    with nbdist.Cluster(hosts=[host.name], framework="jax") as cluster:
        assert nbdist_processes(host)
        host.cut()
        started = time.monotonic()
        try:
            assert repeat_until(lambda: not nbdist_processes(host), SILENCE_S + 2 + END_S)
            assert time.monotonic() - started > SILENCE_S - 2
            assert repeat_until(lambda: bool(cluster._worker_group.engines.dead()), 3 * LOST_S), (
                "the notebook reports them as dead"
            )
        finally:
            host.mend()
