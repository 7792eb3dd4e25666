"""Rank of this process, number of processes, and address of rank 0, from environment variables."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.errors import StartError
from nbdist.utils.sockets import url_host

if TYPE_CHECKING:
    from collections.abc import Mapping

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
"""Variables of `nbdist run`; torchrun and Kubeflow use the same names."""

_RANKS = {
    RANK: WORLD_SIZE,
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "JOB_COMPLETION_INDEX": WORLD_SIZE,
}
"""Variable of the number of processes, by the variable of the rank, in the order of preference."""

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable of torchrun. If it is `True`, torchrun itself listens at `MASTER_PORT`."""

_SLURM_JOB, _SLURM_HOSTS = "SLURM_JOB_ID", "SLURM_STEP_NODELIST"
_SLURM_PORTS = 61440, 4096
"""First port of Slurm jobs without `MASTER_PORT`, and number of ports."""

_LAST_PORT = 65535
_FIRST_HOST = re.compile(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)")
_TF_WORKERS = ("chief", "worker")
"""Tasks of `TF_CONFIG` that train, in the order of their ranks."""


@dataclass(frozen=True)
class Placement:
    """Place of this process among all processes of a program.

    Attributes:
        rank: rank of this process.
        world_size: number of processes.
        coordinator: address of rank 0 as `host:port`; empty for one process.
        addresses: address of each rank from `TF_CONFIG`; empty without it.
    """

    rank: int = 0
    world_size: int = 1
    coordinator: str = ""
    addresses: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """Host of rank 0."""
        return self.coordinator.rpartition(":")[0].strip("[]")


def find(environment: Mapping[str, str]) -> Placement:
    """Return the placement of this process; that of one process without variables of a launcher.

    Raises:
        StartError: variables are missing, or have values that do not fit each other.
    """
    if environment.get("TF_CONFIG"):
        return _of_tensorflow(environment["TF_CONFIG"])
    found = next((name for name in _RANKS if name in environment), None)
    if found is None:
        return Placement()
    if _RANKS[found] not in environment:
        raise StartError(f"{found} is set, but {_RANKS[found]} is not: set the number of processes")
    rank, size = (_number(environment, name) for name in (found, _RANKS[found]))
    if not 0 <= rank < size:
        raise StartError(f"{found}={rank} with {_RANKS[found]}={size}: ranks count from 0")
    if size == 1:
        return Placement()
    return Placement(rank, size, _coordinator(environment))


def _coordinator(environment: Mapping[str, str]) -> str:
    host, port = environment.get(ADDRESS), environment.get(PORT)
    if _SLURM_JOB in environment and _SLURM_HOSTS in environment:
        first, count = _SLURM_PORTS
        host = host or _first_host(environment[_SLURM_HOSTS])
        port = port or str(first + _number(environment, _SLURM_JOB) % count)
    if not host or not port:
        missing = " and ".join(n for n, value in ((ADDRESS, host), (PORT, port)) if not value)
        raise StartError(
            f"the address of rank 0 is unknown: set {missing} to its host name and to a free port, "
            "the same for all processes"
        )
    if environment.get(_AGENT_STORE) == "True":
        number = _number(environment, PORT)
        port = str(number + 1 if number < _LAST_PORT else number - 1)
    return f"{url_host(host)}:{port}"


def _first_host(names: str) -> str:
    """Return the first host of a list of Slurm, such as `gpu[07-12],cpu3`."""
    found = _FIRST_HOST.match(names)
    return "".join(part or "" for part in found.groups()) if found else ""


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise StartError(f"{name}={environment[name]!r} is not a whole number") from None


def _of_tensorflow(text: str) -> Placement:
    try:
        config: Any = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        kind, index = task["type"], int(task["index"])
        counts = {kind: len(cluster.get(kind, ())) for kind in _TF_WORKERS}
        addresses = tuple(address for kind in _TF_WORKERS for address in cluster.get(kind, ()))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise StartError(
            "TF_CONFIG cannot be read: it needs `cluster` with the addresses of the workers, and "
            "`task` with `type` and `index`"
        ) from None
    if kind not in counts or not 0 <= index < counts[kind]:
        raise StartError(
            f"TF_CONFIG: task {kind} {index} is no worker of its cluster; start the program only "
            "for workers"
        )
    if len(addresses) == 1:
        return Placement()
    rank = index if kind == "chief" else index + counts["chief"]
    return Placement(rank, len(addresses), addresses[0], addresses)
