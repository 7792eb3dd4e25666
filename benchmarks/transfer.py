"""Push of a large array to hosts, and pull of a sharded one, against one copy over the same link.

The hosts are network namespaces. Each link to a host has a limited rate. For the pull, the links of
all hosts together have the rate of the one link of the peer. The peer is one copy by ssh.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

import nbdist
from benchmarks import ours
from benchmarks.case import Case, Skipped, interleave
from nbdist.settings import Settings
from tests.netns import Hosts, missing, program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale

HOSTS, RUNS = 4, 3
SIZE_MIB, RATE_MBIT = 1024, 300
TIMES, MEMORY, BESIDE_SHARD = 1.3, 1.2, 0.2
_COPY_S = 300.0
SHARD = """
import jax, numpy as np
rows = jax.NamedSharding(mesh, jax.P("data"))
found = jax.make_array_from_callback(({size},), rows, lambda index: np.full({size}, 1, "u1")[index])
jax.block_until_ready(found)
"""


class Memory:
    """Peak memory of the notebook's process and of all workers, beyond that at the start.

    Args:
        pids: the processes.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        self._before = [_bytes(pid, "VmRSS") for pid in pids]

    def growth(self) -> list[int]:
        """Return the bytes of each process."""
        peaks = (_bytes(pid, "VmHWM") for pid in self._pids)
        return [peak - before for peak, before in zip(peaks, self._before, strict=True)]


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    count, size_mib = scale.of((HOSTS, SIZE_MIB), (2, 24))
    size, rate, runs = size_mib << 20, RATE_MBIT, scale.runs(RUNS)
    what = f"{size_mib} MiB, {count} hosts with links of {rate} Mbit/s"
    if missing():
        yield Skipped(f"push of {what}", missing())
        return
    with Hosts(count) as hosts, ours.quiet():
        settings = Settings.from_environment()
        settings = Settings(runs_folder=settings.runs_folder, ssh_config=str(hosts.ssh_config))
        with nbdist.Cluster(hosts=hosts.names, framework="jax", settings=settings) as cluster:
            cluster.run(SHARD.format(size=size // count * count))
            found = [
                *_push(cluster, hosts, what, size, runs),
                *_pull(cluster, hosts, what, size, runs),
            ]
    yield from found


def _push(cluster: nbdist.Cluster, hosts: Hosts, what: str, size: int, runs: int) -> Iterator[Case]:
    array = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    growths: list[list[int]] = []
    for host in hosts.each:
        host.throttle(f"{RATE_MBIT}mbit")

    def copy() -> float:
        cluster.run("pushed = None")
        memory = Memory(_pids(cluster, hosts))
        began = time.perf_counter()
        cluster.push({"pushed": array})
        took = time.perf_counter() - began
        growths.append(memory.growth())
        return took

    def peer() -> float:
        return _copy(hosts, "cat > /dev/null", array)

    a, b = interleave(copy, peer, runs)
    for host in hosts.each:
        host.throttle("")
    cluster.run("pushed = None")
    yield Case(f"push of {what}, against one copy by ssh", median(a), median(b), "s", TIMES, runs)
    # The notebook has the array before, and the workers have it afterwards.
    notebook = median([size + growth[0] for growth in growths])
    workers = median([max(growth[1:]) for growth in growths])
    for name, most in (("the notebook", notebook), ("a worker", workers)):
        case = f"memory of {name} in a push of {what}, against the array"
        yield Case(case, most, size, "bytes", MEMORY, runs)


def _pull(cluster: nbdist.Cluster, hosts: Hosts, what: str, size: int, runs: int) -> Iterator[Case]:
    growths: list[list[int]] = []

    def copy() -> float:
        _limit_sending(hosts, RATE_MBIT / len(hosts.each))
        memory = Memory(_pids(cluster, hosts))
        began = time.perf_counter()
        cluster.pull(["found"], ranks="0")
        took = time.perf_counter() - began
        growths.append(memory.growth())
        return took

    def peer() -> float:
        _limit_sending(hosts, RATE_MBIT)
        return _copy(hosts, f"head -c {size} /dev/zero")

    a, b = interleave(copy, peer, runs)
    _limit_sending(hosts, 0)
    name = f"pull of a sharded array of {what} in sum"
    yield Case(f"{name}, against one copy by ssh", median(a), median(b), "s", TIMES, runs)
    notebook = median([growth[0] for growth in growths])
    case = f"memory of the notebook in a {name}, against the array"
    yield Case(case, notebook, size, "bytes", MEMORY, runs)
    workers = median([max(growth[1:]) for growth in growths])
    case = f"memory of a worker beside its shard in a {name}, against the array"
    yield Case(case, workers, size, "bytes", BESIDE_SHARD, runs)


def _limit_sending(hosts: Hosts, rate_mbit: float) -> None:
    for host in hosts.each:
        host.throttle_sending(f"{rate_mbit:g}mbit" if rate_mbit else "")


def _copy(hosts: Hosts, command: str, array: np.ndarray | None = None) -> float:
    """Return the seconds of one copy between this machine and the first host."""
    began = time.perf_counter()
    subprocess.run(
        [program("ssh") or "ssh", "-F", str(hosts.ssh_config), hosts.names[0], command],
        input=None if array is None else array.data,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=_COPY_S,
    )
    return time.perf_counter() - began


def _pids(cluster: nbdist.Cluster, hosts: Hosts) -> list[int]:
    """Return the pids of this process and of the workers, in the namespace of this machine."""
    workers = cluster.workers(measure=False)
    found = [os.getpid()]
    for host, worker in zip(hosts.each, workers, strict=True):
        own = {process.pid: _own_pid(process.pid) for process in host.processes()}
        found += [pid for pid, inside in own.items() if inside == worker.pid]
    return found


def _own_pid(pid: int) -> int:
    """Return the pid of a process in its own namespace."""
    return int(_status(pid, "NSpid")[-1])


def _bytes(pid: int, name: str) -> int:
    return int(_status(pid, name)[0]) << 10


def _status(pid: int, name: str) -> list[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:")).split()[1:]
