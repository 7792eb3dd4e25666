"""Environment variables of the engines, shared and individual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster import resources
from nbdist.errors import StartError
from nbdist.records import RANK_VARIABLE
from nbdist.utils import hash_seed
from nbdist.utils.gpus import VISIBLE_GPUS, is_slice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.records import ClusterRequest

_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
FIRST_SPARE = 1 << 20
"""Place of the first spare. It exceeds every rank."""

_ORDER = "CUDA_DEVICE_ORDER"


def shared(request: ClusterRequest) -> dict[str, str]:
    """Return the variables to set before a framework is imported. `--env` takes precedence."""
    values = {
        "TF_CPP_MIN_LOG_LEVEL": "1",
        # Engines and frameworks may share a GPU, so none may allocate all of its memory at once.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        hash_seed.VARIABLE: hash_seed.value(),
    }
    if len(request.frameworks) < len(resources.FRAMEWORKS):  # else the first cell selects it
        values["KERAS_BACKEND"] = next(iter(request.frameworks), "jax")
    if request.cpus_per_worker:
        values |= dict.fromkeys(_THREADS, str(request.cpus_per_worker))
    return values | request.env


def of_spare(number: int) -> dict[str, str]:
    """Return the variables of a spare engine. Its place is beyond those of the ranks."""
    return {RANK_VARIABLE: str(FIRST_SPARE + number)}


def of_places(
    request: ClusterRequest, gpus: Callable[[str], Sequence[str]]
) -> list[dict[str, str]]:
    """Return the individual variables of the ranks, by place.

    Args:
        request: the request for the cluster.
        gpus: returns the NVIDIA GPUs of a host, given its key.

    Raises:
        StartError: hosts have fewer GPUs than requested. The message contains a line for each.
    """
    faults: list[str] = []
    own: list[dict[str, str]] = [{} for _ in request.hosts]
    for key in dict.fromkeys(host.key for host in request.hosts):
        places = [place for place, host in enumerate(request.hosts) if host.key == key]
        there, env = gpus(key), request.env | request.hosts[places[0]].env
        if there and VISIBLE_GPUS not in env:
            counts = [request.hosts[n].devices or request.devices_per_host for n in places]
            faults += _faults(key, there, counts)
            shares = resources.divide_gpus(there, counts)
            for place, share in zip(places, shares, strict=True):
                own[place][VISIBLE_GPUS] = ",".join(share)
                if _ORDER not in env:  # nvidia-smi's order of indices; CUDA's own is by speed
                    own[place][_ORDER] = "PCI_BUS_ID"
    if faults:
        raise StartError("\n".join(faults))
    return own


def _faults(key: str, gpus: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    """Yield the reasons why the workers of a host cannot have the requested numbers of GPUs."""
    host = key or "this machine"
    needed = sum(count or 1 for count in counts) if any(counts) else 0
    if needed > len(gpus):
        workers = f"{len(counts)} workers need" if len(counts) > 1 else "its worker needs"
        yield (
            f"{host}: {workers} {needed} GPUs, and {len(gpus)} are visible there "
            f"({', '.join(gpus)}): request at most {len(gpus)}"
        )
    elif max(counts) > 1 and any(map(is_slice, gpus)):
        remedy = f"name the host once for each slice, as in {key}:1 {key}:1"
        yield (
            f"{host}: a worker uses one MIG slice, and {max(counts)} are requested: "
            f"{remedy if key else 'use --devices-per-host 1'}"
        )
