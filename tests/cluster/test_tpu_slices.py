"""Hosts of TPU slices, from variables and from a double of the metadata server."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from nbdist.cluster import inventory, resources, tpu_slices
from nbdist.errors import UsageError
from nbdist.records import ClusterRequest, Host, TpuPlace
from tests.tpu_double import attributes, served

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MULTISLICE = {"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1", "MEGASCALE_NUM_SLICES": "2"}
POD = {
    "TPU_WORKER_HOSTNAMES": "job-slice-1-0.job,job-slice-1-1.job",
    "TPU_WORKER_ID": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_TOPOLOGY": "2x4",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job:8080",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "1",
}
ALONE = {"MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": ""}
ONE = {name: value for name, value in POD.items() if not name.startswith("MEGASCALE_")}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of TPUs. JAX sets one of them when it is imported."""
    for name in os.environ:
        if name.startswith(("TPU_", "MEGASCALE_", "LIBTPU_")):
            monkeypatch.delenv(name)


@contextlib.contextmanager
def machine(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, str]) -> Iterator[Any]:
    """Make this machine a VM with these attributes."""
    with served(found) as server:
        monkeypatch.setenv("GCE_METADATA_IP", server.address)
        yield server


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def places(hosts: tuple[Host, ...]) -> list[tuple[str, int, int]]:
    return [(h.name, h.tpu.slice_index, h.tpu.worker) for h in hosts if h.tpu is not None]


@pytest.mark.parametrize("is_old", [True, False])
def test_a_tpu_vm_finds_the_hosts_of_its_slice(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    found = attributes(["10.0.0.1", "10.0.0.2"], 1)
    if not is_old:
        found["worker-network-endpoints"] = "10.0.0.1,10.0.0.2"
    with machine(monkeypatch, found):
        first, second = inventory.choose(["tpu"], python="/opt/python")
    assert (first.name, first.address, first.python) == ("10.0.0.1", "", "/opt/python")
    assert (second.name, second.address) == ("", "10.0.0.2")
    assert first.env == second.env == {"JAX_PLATFORMS": "tpu,cpu"}
    place = TpuPlace("v4-16", "2x2x2", slice_index=0, slices=1, worker=0, workers=2)
    assert first.tpu == place
    assert second.tpu == structs.replace(place, worker=1)


def test_a_failing_metadata_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, attributes(["10.0.0.1"], 0)) as server:
        server.refusals = 2
        (host,) = inventory.of("tpu")
    assert host.address == "10.0.0.1"


def test_variables_of_a_pod_take_precedence_and_reach_each_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_all(monkeypatch, ONE | {"LIBTPU_INIT_ARGS": "--xla_tpu_x=1"})
    with machine(monkeypatch, attributes(["10.0.0.9"], 0)):
        first, second = inventory.of(["tpu"])
    assert (first.name, second.name) == ("job-slice-1-0.job", "")
    shared = {**ONE, "LIBTPU_INIT_ARGS": "--xla_tpu_x=1", "JAX_PLATFORMS": "tpu,cpu"}
    assert [first.env, second.env] == [shared | {"TPU_WORKER_ID": n} for n in "01"]


def test_a_slice_of_one_host_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    (host,) = inventory.of("tpu")
    assert (host.name, host.address) == ("", "")
    assert ClusterRequest(hosts=(host,), frameworks=("jax",)).is_local


def test_names_of_a_jobset_give_the_hosts_of_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(
        monkeypatch,
        POD | {"TPU_PROCESS_ADDRESSES": "job-slice-1-0.job:8476,job-slice-1-1.job:8477"},
    )
    hosts = inventory.of("tpu")
    assert places(hosts) == [
        ("job-slice-0-0.job", 0, 0),
        ("job-slice-0-1.job", 0, 1),
        ("job-slice-1-0.job", 1, 0),
        ("", 1, 1),
        ("job-slice-2-0.job", 2, 0),
        ("job-slice-2-1.job", 2, 1),
    ]
    last = hosts[-1].env
    assert last["TPU_WORKER_HOSTNAMES"] == "job-slice-2-0.job,job-slice-2-1.job"
    assert last["TPU_PROCESS_ADDRESSES"] == "job-slice-2-0.job:8476,job-slice-2-1.job:8477"
    assert (last["MEGASCALE_SLICE_ID"], last["TPU_WORKER_ID"]) == ("2", "1")
    assert tpu_slices.is_whole(hosts)


def refused(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> str:
    set_all(monkeypatch, variables)
    with pytest.raises(UsageError) as caught:
        inventory.of("tpu")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TPU_WORKER_ID": ""}, "TPU_WORKER_ID is not set"),
        ({"TPU_WORKER_ID": "one"}, "TPU_WORKER_ID is 'one' on this TPU host: expected a whole"),
        (
            {"TPU_WORKER_ID": "2"},
            "this is host 2 of its slice, but its hosts are job-slice-1-0.job",
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b,c"},
            "2x4 are 8 chips, which 3 hosts (a, b, c) cannot share",
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,a"}, "a, a: each host of a slice needs one name"),
        (ALONE | {"TPU_WORKER_HOSTNAMES": "a$,b"}, "invalid host 'a$'"),
        ({"MEGASCALE_SLICE_ID": "3"}, "MEGASCALE_SLICE_ID is 3, but MEGASCALE_NUM_SLICES is 3"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "are no names of one JobSet: list all hosts in a file"),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "x:1"}, "MEGASCALE_COORDINATOR_ADDRESS=x are no names"),
    ],
)
def test_faults_of_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    assert message in refused(monkeypatch, POD | changes)


def test_faults_of_the_metadata_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attributes(["10.0.0.1"], 0) | {"worker-network-endpoints": "10.0.0.1:8470"}
    with machine(monkeypatch, found):
        assert "contains '10.0.0.1:8470': expected" in refused(monkeypatch, {})


def test_another_machine_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "run the notebook on a host of the slice, or name the hosts, as in %dist_start host1"
    with machine(monkeypatch, {}):
        text = refused(monkeypatch, {})
    assert "this machine is no host of a TPU slice: TPU_WORKER_HOSTNAMES is not set" in text
    assert "its metadata contains no agent-worker-number" in text
    assert remedy in text
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{closed.getsockname()[1]}"
        text = refused(monkeypatch, {"GCE_METADATA_IP": name})
    assert f"metadata server ({name}) does not respond: <urlopen error" in text
    assert remedy in text
    text = refused(monkeypatch, {"TPU_SKIP_MDS_QUERY": "1"})
    assert "TPU_SKIP_MDS_QUERY is set, as JAX sets it on machines without a TPU" in text


def test_unknown_slices_need_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own = attributes(["10.0.0.1"], 0, "v4-8", "2x2x1", **MULTISLICE)
    with machine(monkeypatch, own):
        assert "finds the hosts of 1: name one host of each other slice" in refused(monkeypatch, {})


def test_names_beside_one_slice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        machine(monkeypatch, attributes(["10.0.0.1"], 0)),
        pytest.raises(UsageError, match="leave out gpu1, gpu2"),
    ):
        inventory.choose(["tpu", "gpu1", "gpu2"])


def test_a_file_of_hosts_may_contain_a_host_named_tpu(tmp_path: Any) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text("[hosts.tpu]\n")
    assert inventory.choose(["tpu"], file=str(file)) == (Host(name="tpu"),)


@pytest.mark.parametrize(
    ("accelerator", "topology", "slices", "text"),
    [
        ("v5litepod-16", "4x4", 1, "v5litepod-16: 16 x TPU v5e, 15.8 GiB each: 1 slice of 4x4"),
        ("v4-16", "2x2x2", 2, "v4-16: 16 x TPU v4, 30.8 GiB each: 2 slices of 2x2x2"),
        ("v4-16", "", 1, "v4-16: 8 x TPU v4, 30.8 GiB each: 1 slice of 2x2x2"),
        ("v6e-8", "2x4", 1, "v6e-8: 8 x TPU v6e, 31.2 GiB each: 1 slice of 2x4"),
        ("tpu7x-16", "", 1, "tpu7x-16: 8 x TPU v7, 179 GiB each: 1 slice of 2x2x2"),
        ("v9-8", "2x4", 2, "2 x v9-8 of 2x4"),
        ("", "", 1, "a TPU slice"),
    ],
)
def test_slices_are_described_by_the_catalog(
    accelerator: str, topology: str, slices: int, text: str
) -> None:
    place = TpuPlace(accelerator, topology, slice_index=0, slices=slices, worker=0, workers=1)
    assert tpu_slices.describe(place).startswith(text)


def slice_hosts(count: int) -> tuple[Host, ...]:
    places = (TpuPlace("v4-16", "2x2x2", 0, 1, number, count) for number in range(count))
    return tuple(Host(name=f"h{number}", tpu=place) for number, place in enumerate(places))


def test_a_part_of_a_slice_is_refused() -> None:
    hosts = slice_hosts(3)
    assert tpu_slices.is_whole(hosts)
    for wrong in (hosts[:2], hosts[::-1], (*hosts, Host())):
        assert not tpu_slices.is_whole(wrong)
        with pytest.raises(UsageError, match="runs on all of its 3 hosts in their order"):
            resources.check(ClusterRequest(hosts=wrong, frameworks=("jax",)), 1)
    request = ClusterRequest(hosts=hosts, frameworks=("jax",), min_hosts=2, devices_per_host=4)
    with pytest.raises(UsageError, match=r"--min-hosts 2: .*\n--devices-per-host 4: "):
        resources.check(request, 1)


def test_tpus_run_jax() -> None:
    assert resources.choose_frameworks(None, slice_hosts(1)) == ("jax",)
    assert resources.choose_frameworks("none", slice_hosts(1)) == ()
    with pytest.raises(UsageError, match="--framework both: TPUs run JAX"):
        resources.choose_frameworks("both", slice_hosts(1))
