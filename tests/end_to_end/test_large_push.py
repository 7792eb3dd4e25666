"""Large pushed objects on workers of this machine and of other hosts, also after faults."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

import nbdist
from nbdist.errors import TransferError
from nbdist.execution.replay_journal import LARGE_BYTES
from nbdist.records import Saving, StepOptions
from nbdist.utils.polling import repeat_until
from tests import exact
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.netns import Host

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_folders")]

SUM = "import zlib\nzlib.crc32(big)"
NAMES = "sorted(name for name in globals() if name in ('big', 'other'))"
FLOW_S = 20.0
SEVERAL_HOSTS = 3
SLOW_ROWS = 3_000_000
"""Numbers of 8 bytes that take longer than 100 heartbeats at 12 Mbit/s."""


def big(size: int = 3 * LARGE_BYTES // 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, size, np.uint8)


def values() -> dict[str, object]:
    """Return objects of each kind, large in sum."""
    rows = np.random.default_rng(1).normal(size=(1000, 3000))
    return {
        "rows": rows,
        "columns": np.asfortranarray(rows),
        "every_other": rows[::2, ::3],
        "brain": rows.astype(ml_dtypes.bfloat16),
        "brain_columns": np.asfortranarray(rows.astype(ml_dtypes.bfloat16)),
        "times": np.arange(10**6).astype("M8[ns]"),
        "scalar": np.array(3, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), ml_dtypes.bfloat16),
        "texts": np.array(["a", "bc"]),
        "objects": np.array([None, {"a": 1}], object),
        "records": np.zeros(3, [("a", "f4"), ("b", "i8")]),
        "tree": {"a": [rows[:10], (1, "x")], "b": b"bytes" * 10},
    }


def assert_equal(found: object, expected: object) -> None:
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes() or expected.dtype == object
        assert found.flags.f_contiguous == expected.flags.f_contiguous or not found.size
        assert found.flags.writeable
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, type(expected))
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def journal(cluster: nbdist.Cluster) -> list[Path]:
    return sorted((cluster._folder / "journal").glob("*.pickle"))


@pytest.fixture(scope="module")
def local() -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=2, framework="jax") as cluster:
        yield cluster


def test_values_of_all_types_arrive_bit_for_bit(
    local: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    size = local.push(values())
    assert size > LARGE_BYTES
    assert "copying 68.9 MiB to 2 workers" in capsys.readouterr().out
    for rank, found in local.pull(list(values())).items():
        assert_equal(found, values())
        assert rank in (0, 1)
    local.restart()
    assert not journal(local), "a restart deletes the files of earlier pushes"


def test_small_values_show_nothing_and_need_no_file(
    local: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    local.push({"small": big(1000)})
    assert capsys.readouterr().out == ""
    assert not journal(local)


def test_an_object_that_a_worker_cannot_create_binds_nothing(local: nbdist.Cluster) -> None:
    class Fragile:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return exec, ("if rank:\n    raise KeyError('cannot be created')",)

    local.run("import builtins\nbuiltins.rank = rank")
    with pytest.raises(TransferError, match="rank 1: KeyError: 'cannot be created'"):
        local.push({"big": big(), "other": Fragile()})
    assert set(local.run(NAMES).results.values()) == {"[]"}
    assert not journal(local)


def test_a_replaced_worker_has_the_large_value(tmp_path: Path) -> None:
    with nbdist.Cluster(hosts=2, framework="jax") as local:
        replace_a_worker(local, tmp_path)


def replace_a_worker(local: nbdist.Cluster, tmp_path: Path) -> None:
    steps = 400
    local.push({"big": big()})
    local.run(f"{exact.setup(4)}\nw = w * int(big[0] > 300)")
    options = StepOptions(data="xs", batch=4, steps=steps)
    saving = Saving(folder=str(tmp_path / "saved"), every_steps=20)
    pid = local.workers(measure=False)[1].pid
    killer = exact.after(tmp_path, 60, lambda: os.kill(pid, signal.SIGKILL))
    run = local.run(exact.STEP, step=options, saving=saving)
    killer.join()
    np.testing.assert_array_equal(run.loss, exact.losses(steps))
    assert len(run.recoveries) == 1
    assert set(local.run(SUM).results.values()) == {str(zlib.crc32(big()))}


# Other hosts.


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(SEVERAL_HOSTS) as network:
        yield network


@pytest.fixture
def hosts(network: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    return network


@pytest.fixture
def remote(hosts: Hosts) -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=hosts.names, framework="none") as cluster:
        yield cluster


def sent_bytes(host: Host) -> int:
    """Return the bytes that the network has sent to a host."""
    return int(Path(f"/sys/class/net/{host._cable}/statistics/tx_bytes").read_text())


def meanwhile(host: Host, act: Callable[[], None]) -> threading.Thread:
    """Call `act` in a thread once a host has received 5 MB more."""
    goal = sent_bytes(host) + 5_000_000

    def wait() -> None:
        assert repeat_until(lambda: sent_bytes(host) > goal, FLOW_S)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@needs_hosts
def test_the_notebook_sends_once_and_hosts_pass_on(hosts: Hosts, remote: nbdist.Cluster) -> None:
    before = [sent_bytes(host) for host in hosts.each]
    to_notebook = bridge_bytes(hosts)
    remote.push(values())
    received = [sent_bytes(host) - b for host, b in zip(hosts.each, before, strict=True)]
    size = sum(each.stat().st_size for each in journal(remote))
    assert all(size < each < 1.2 * size for each in received), (size, received)
    assert bridge_bytes(hosts) - to_notebook < 1.2 * size, "the notebook has sent it once"
    for found in remote.pull(list(values())).values():
        assert_equal(found, values())
    listening = [address for host in hosts.each for address, port in host.listening() if port != 22]
    assert set(listening) == {"127.0.0.1"}, "no port of the push stays open"


@needs_hosts
def test_hosts_that_do_not_reach_each_other_receive_from_the_notebook(
    hosts: Hosts, remote: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in hosts.each:
        host.wall_off(on=True)
    try:
        remote.push({"big": big()})
    finally:
        for host in hosts.each:
            host.wall_off(on=False)
    assert "sent again by the notebook: rank 1" in capsys.readouterr().out
    assert set(remote.run(SUM).results.values()) == {str(zlib.crc32(big()))}


@needs_hosts
def test_a_worker_that_dies_in_the_middle_binds_nothing(
    hosts: Hosts, remote: nbdist.Cluster
) -> None:
    remote.push({"big": 1})
    hosts.each[0].throttle("80mbit")
    pid = remote.workers(measure=False)[1].pid
    (process,) = [p for p in hosts.each[1].processes() if own_pid(p.pid) == pid]
    killer = meanwhile(hosts.each[1], process.kill)
    try:
        with pytest.raises(TransferError, match="rank 1 is dead"):
            remote.push({"big": big(), "other": 2})
    finally:
        killer.join()
        hosts.each[0].throttle("")
    assert remote.run(f"big, {NAMES}", ranks="0,2").results == dict.fromkeys((0, 2), "(1, ['big'])")
    assert not journal(remote)
    remote.restart()
    remote.push({"big": big()})
    assert set(remote.run(SUM).results.values()) == {str(zlib.crc32(big()))}


@needs_hosts
@pytest.mark.full  # rare
def test_an_interrupt_in_the_middle_binds_nothing(hosts: Hosts, remote: nbdist.Cluster) -> None:
    hosts.each[0].throttle("80mbit")
    interrupt = meanwhile(hosts.each[2], lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            remote.push({"big": big()})
    finally:
        interrupt.join()
        hosts.each[0].throttle("")
    assert set(remote.run(NAMES).results.values()) == {"[]"}
    assert not journal(remote)
    remote.push({"big": big()})
    assert set(remote.run(SUM).results.values()) == {str(zlib.crc32(big()))}


@needs_hosts
@pytest.mark.full  # rare
def test_an_interrupt_ends_a_pull(hosts: Hosts, remote: nbdist.Cluster) -> None:
    remote.run("import numpy as np\nfound = np.ones(20_000_000)")
    for host in hosts.each:
        host.throttle_sending("80mbit")
    before = bridge_bytes(hosts, "rx")
    goal = before + 5_000_000

    def interrupt() -> None:
        assert repeat_until(lambda: bridge_bytes(hosts, "rx") > goal, FLOW_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            remote.pull(["found"])
    finally:
        thread.join()
        for host in hosts.each:
            host.throttle_sending("")
    assert bridge_bytes(hosts, "rx") - before < 160_000_000, "less than one of the arrays"
    assert remote.pull(["found"], ranks="1")[1]["found"].sum() == 20_000_000


@needs_hosts
def test_a_pull_that_fills_the_link_for_long_keeps_the_worker(
    hosts: Hosts, remote: nbdist.Cluster
) -> None:
    """The worker responds to heartbeats late, for longer than the controller waits for one."""
    remote.run(f"import numpy as np\nlong = np.arange({SLOW_ROWS})")
    hosts.each[0].throttle_sending("12mbit")
    try:
        found = remote.pull(["long"], ranks="0")[0]["long"]
    finally:
        hosts.each[0].throttle_sending("")
    np.testing.assert_array_equal(found, np.arange(SLOW_ROWS))
    assert set(remote.run("len(long)").results.values()) == {str(SLOW_ROWS)}


@needs_hosts
@pytest.mark.full  # the limit of a connection without a byte is 20 s
def test_a_frozen_worker_in_the_middle_ends_in_an_error(
    hosts: Hosts, remote: nbdist.Cluster
) -> None:
    pid = remote.workers(measure=False)[1].pid
    (process,) = [p for p in hosts.each[1].processes() if own_pid(p.pid) == pid]
    process.suspend()
    try:
        with (
            remote._worker_group.engines.within(5.0),
            pytest.raises(TransferError, match="no answer from the engines"),
        ):
            remote.push({"big": big()})
    finally:
        process.resume()
    assert set(remote.run(NAMES).results.values()) == {"[]"}


def own_pid(pid: int) -> int:
    """Return the pid of a process in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid")).split()[-1])


def bridge_bytes(hosts: Hosts, way: str = "tx") -> int:
    """Return the bytes that this machine has sent to the network of the hosts, or received."""
    return int(Path(f"/sys/class/net/{hosts._bridge}/statistics/{way}_bytes").read_text())
