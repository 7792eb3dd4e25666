"""`%dist_start tpu` on hosts in network namespaces, with a double of the metadata server.

No TPU is available, so JAX runs on CPUs there (docs/testing.md). JAX itself reads the double on
each host, and its process ids are compared with the ranks.
"""

from __future__ import annotations

import ast
import contextlib
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import nbdist
from nbdist.cluster import tpu_slices
from nbdist.errors import StartError, UsageError, WorkerError
from nbdist.utils.polling import repeat_until
from tests.cluster.test_tpu_slices import plain_environment  # noqa: F401 - for all tests
from tests.netns import Hosts, needs_hosts
from tests.tpu_double import attributes, served, served_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

pytestmark = [needs_hosts, pytest.mark.usefixtures("own_folders")]

JAX_VIEW = """
import os, jax
from jax._src import distributed
from jax._src.clusters.cloud_tpu_cluster import {environment} as Tpu
joined = distributed.global_state
env = {{name: value for name, value in os.environ.items() if name.startswith(("MEGA", "TPU_W"))}}
view = (
    joined.process_id, joined.num_processes, Tpu.get_process_id(), Tpu.get_process_count(),
    jax.process_index(), jax.process_count(), os.environ["JAX_PLATFORMS"], env,
)
view
"""
END_S = 30.0
DOUBLE = "tests.tpu_double"


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(3) as network:
        yield network


@pytest.fixture
def hosts(network: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts without TPUs, and without processes of nbdist after the test."""
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    monkeypatch.setattr(tpu_slices, "PLATFORMS", "cpu")
    yield network
    assert repeat_until(lambda: not left_behind(network), END_S), left_behind(network)


def left_behind(network: Hosts) -> list[str]:
    """Return the command lines of processes on the hosts, without sshd and the double."""
    found = []
    for process in (process for host in network.each for process in host.processes()):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if process.name() not in ("sshd", "unshare", "ip", "sh") and DOUBLE not in line:
                found.append(line)
    return found


@contextlib.contextmanager
def vms(
    network: Hosts, monkeypatch: pytest.MonkeyPatch, *slices: tuple[int, ...]
) -> Iterator[None]:
    """Make TPU VMs of the hosts with these numbers, slice by slice; 0 is this machine."""
    addresses = [network.address, *(host.address for host in network.each)]
    with contextlib.ExitStack() as servers:
        for index, numbers in enumerate(slices):
            megascale = {
                "MEGASCALE_COORDINATOR_ADDRESS": addresses[slices[0][0]],
                "MEGASCALE_NUM_SLICES": str(len(slices)),
                "MEGASCALE_SLICE_ID": str(index),
            }
            for worker, number in enumerate(numbers):
                own = [addresses[other] for other in numbers]
                found = attributes(own, worker, **(megascale if len(slices) > 1 else {}))
                if number:
                    servers.enter_context(served_on(network.each[number - 1], found))
                else:
                    server = servers.enter_context(served(found))
                    monkeypatch.setenv("GCE_METADATA_IP", server.address)
        yield


def views(cluster: nbdist.Cluster, environment: str = "GceTpuCluster") -> dict[int, Any]:
    results = cluster.run(JAX_VIEW.format(environment=environment)).results
    return {rank: ast.literal_eval(text) for rank, text in results.items()}


def cluster_of(shell: InteractiveShell) -> nbdist.Cluster:
    found: nbdist.Cluster = shell.magics_manager.registry["DistMagics"].running_cluster("x")
    return found


def test_the_hosts_of_a_slice_train_together(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    shell: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The notebook is on the second host of the slice."""
    with vms(hosts, monkeypatch, (1, 0)):
        shell.run_line_magic("dist_start", "tpu")
        assert "2 workers on 2 hosts, v4-16: 8 x TPU v4, 30.8 GiB each: 1 slice of 2x2x2" in (
            capsys.readouterr().out
        )
        cluster = cluster_of(shell)
        assert cluster.request.frameworks == ("jax",)
        assert views(cluster) == {rank: (rank, 2, rank, 2, rank, 2, "cpu", {}) for rank in range(2)}
        table = shell.run_line_magic("dist_hosts", "")
        assert [row.tpu for row in table] == ["slice 0, host 0", "slice 0, host 1"]
        assert [row.address for row in table] == [hosts.each[0].address, hosts.address]
        assert "1 slice of 2x2x2" in table.lines()[0]
        with pytest.raises(UsageError, match="runs on all of its 2 hosts"):
            shell.run_line_magic("dist_resize", "1 hosts")
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}
        shell.run_line_magic("dist_stop", "")


@pytest.mark.full  # a start needs them too
def test_a_restart_needs_all_hosts_of_the_slice(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vms(hosts, monkeypatch, (1, 0)), nbdist.Cluster("tpu") as cluster:
        hosts.each[0].power_off()
        try:
            with pytest.raises(StartError, match="a TPU slice runs on all of its hosts"):
                cluster.restart()
        finally:
            hosts.each[0].power_on()
        assert not cluster.running


def test_slices_are_joined_in_the_order_of_megascale(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook is in the second slice, and asks the coordinator for the hosts of the first."""
    coordinator = hosts.each[0].address
    with vms(hosts, monkeypatch, (1, 2), (0, 3)), nbdist.Cluster("tpu") as cluster:
        env = {"MEGASCALE_COORDINATOR_ADDRESS": coordinator, "MEGASCALE_NUM_SLICES": "2"}
        assert views(cluster) == {
            rank: (rank, 4, rank, 4, rank, 4, "cpu", env | {"MEGASCALE_SLICE_ID": str(rank // 2)})
            for rank in range(4)
        }
        assert [row.tpu for row in cluster.hosts()] == [
            f"slice {rank // 2}, host {rank % 2}" for rank in range(4)
        ]


def test_a_named_host_describes_a_slice_that_this_machine_cannot_find(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, shell: InteractiveShell
) -> None:
    with vms(hosts, monkeypatch, (0,), (2,)):
        shell.run_line_magic("dist_start", f"tpu {hosts.names[1]}")
        assert [row.address for row in cluster_of(shell).hosts()] == [
            hosts.address,
            hosts.each[1].address,
        ]
        shell.run_line_magic("dist_stop", "")
        with pytest.raises(UsageError, match=rf"{hosts.names[2]}: Google Cloud's metadata"):
            shell.run_line_magic("dist_start", f"tpu {hosts.names[2]}")


def test_slices_of_different_programs_are_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        vms(hosts, monkeypatch, (0,), (2,)),
        served_on(hosts.each[2], attributes([hosts.each[2].address], 0)),
        pytest.raises(UsageError, match="are not the 2 slices of one program"),
    ):
        nbdist.Cluster(["tpu", hosts.names[2]])


@pytest.mark.full  # tests/cluster/test_tpu_slices.py covers them
def test_variables_of_a_pod_reach_the_workers(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = f"{hosts.each[0].name},{hosts.address}"
    pod = {
        "TPU_WORKER_HOSTNAMES": names,
        "TPU_WORKER_ID": "1",
        "TPU_ACCELERATOR_TYPE": "v4-16",
        "TPU_TOPOLOGY": "2x2x2",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
    }
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    own = {name: value for name, value in pod.items() if name.startswith(("MEGA", "TPU_W"))}
    with nbdist.Cluster("tpu") as cluster:
        assert views(cluster, "GkeTpuCluster") == {
            rank: (rank, 2, rank, 2, rank, 2, "cpu", own | {"TPU_WORKER_ID": str(rank)})
            for rank in range(2)
        }


@pytest.mark.parametrize("slices", [((0, 1, 2, 3),), ((1, 3), (0, 2))])
def test_a_host_that_does_not_respond_starts_nothing(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    shell: InteractiveShell,
    slices: tuple[tuple[int, ...], ...],
) -> None:
    """In the second case, it is the coordinator, which nbdist asks for the hosts of its slice."""
    lost = hosts.each[0]
    with vms(hosts, monkeypatch, *slices):
        lost.power_off()
        try:
            with pytest.raises((StartError, UsageError)) as caught:
                shell.run_line_magic("dist_start", "tpu")
        finally:
            lost.power_on()
        assert repeat_until(lambda: not left_behind(hosts), END_S), left_behind(hosts)
    text = str(caught.value)
    assert lost.address in text
    assert "ssh: connect to host" in text
    if len(slices) == 1:
        assert "1 of the hosts cannot be reached" in text
        assert "a TPU slice runs on all of its hosts, and none was started" in text
        assert "--min-hosts" not in text
    else:
        assert "hosts of other TPU slices cannot be asked" in text
    with pytest.raises(nbdist.NoClusterError):
        shell.run_line_magic("dist_status", "")


def test_a_host_without_a_tpu_is_reported(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX does not compute on the CPU of a TPU VM whose TPU it cannot use."""
    monkeypatch.setattr(tpu_slices, "PLATFORMS", "tpu,cpu")
    with vms(hosts, monkeypatch, (1, 0)), pytest.raises(WorkerError) as caught:
        nbdist.Cluster("tpu")
    text = str(caught.value)
    assert "rank 0: StartError: JAX cannot use the TPU of this host: install" in text
    assert "Unable to initialize backend 'tpu'" in text


def test_another_machine_is_refused(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # as JAX sets it
    with pytest.raises(UsageError, match="this machine is no host of a TPU slice"):
        shell.run_line_magic("dist_start", "tpu")
    with pytest.raises(nbdist.NoClusterError):
        shell.run_line_magic("dist_status", "")
