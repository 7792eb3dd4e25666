"""The environment of the engines: what all share, and what is each rank's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster import hosts
from nbdist.records import RANK_VARIABLE

if TYPE_CHECKING:
    from nbdist.records import ClusterRequest

_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
FIRST_SPARE = 1 << 20
"""More ranks than there will be."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def shared(request: ClusterRequest) -> dict[str, str]:
    """What must be set before a framework is imported; the user's own `--env` wins."""
    first = "tensorflow" if "tensorflow" in request.frameworks else "jax"
    values = {
        "KERAS_BACKEND": first,
        "TF_CPP_MIN_LOG_LEVEL": "1",
        # Engines and frameworks may share a GPU: none takes all of its memory at once.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if request.cpus_per_worker:
        values |= dict.fromkeys(_THREADS, str(request.cpus_per_worker))
    return values | request.env


def of_spare(number: int) -> dict[str, str]:
    """Of an engine that waits for a rank: it has a place beyond those of the ranks."""
    return {RANK_VARIABLE: str(FIRST_SPARE + number)}


def of_places(request: ClusterRequest) -> list[dict[str, str]]:
    """What a rank has for itself, by its place."""
    gpus = hosts.visible_gpus()
    shares = hosts.divide_gpus(gpus, request.hosts, request.devices_per_host)
    own: list[dict[str, str]] = [{} for _ in range(request.hosts)]
    if gpus and _VISIBLE not in request.env:
        for values, share in zip(own, shares, strict=True):
            values[_VISIBLE] = ",".join(share)
    return own
