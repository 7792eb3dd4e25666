"""Validation of a cluster request, and the division of GPUs and cores among engines."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, get_args

import psutil

from nbdist.cluster import tpu_slices
from nbdist.cluster.remote_host.environment_lock import find_uv
from nbdist.errors import UsageError
from nbdist.records import ClusterRequest, Communication, Host, options_of
from nbdist.utils.gpus import visible_gpus
from nbdist.utils.installed import lacks_tensorflow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Framework

FRAMEWORKS: tuple[Framework, ...] = ("tensorflow", "jax")
FRAMEWORK_CHOICES = ("tensorflow", "jax", "both")
NO_FRAMEWORK = "none"
"""Choice of a cluster that loads no framework."""

_OPTIONS = options_of(ClusterRequest).values()
_NUMBERS = [o for o in _OPTIONS if o.record is ClusterRequest and o.least is not None]
_COMMUNICATIONS = get_args(Communication)


def choose_frameworks(
    choice: str | None, chosen: Sequence[Host] = (Host(),), *, here: bool = False
) -> tuple[Framework, ...]:
    """Return the frameworks to load.

    Args:
        choice: one of `FRAMEWORK_CHOICES` or `NO_FRAMEWORK`; None for all that are installed here,
            and for JAX on TPUs.
        chosen: the hosts. Frameworks must be installed here only if one of them is this machine.
        here: True if frameworks must be installed here in any case.

    Raises:
        UsageError: a framework is unknown, or is not installed.
    """
    if choice == NO_FRAMEWORK:
        return ()
    if choice is not None and choice not in FRAMEWORK_CHOICES:
        raise UsageError(
            f"unknown framework {choice!r}: choose from {', '.join(FRAMEWORK_CHOICES)}"
        )
    if any(host.tpu for host in chosen):
        if choice not in (None, "jax"):
            raise UsageError(f"--framework {choice}: TPUs run JAX, leave out --framework")
        choice = "jax"
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if choice is None and installed:
        return tuple(installed)
    wanted = FRAMEWORKS if choice in (None, "both") else tuple(n for n in FRAMEWORKS if n == choice)
    missing = [name for name in wanted if name not in installed]
    here = here or any(not host.name for host in chosen)
    if missing and (here or choice is None):
        raise UsageError(f"{' and '.join(missing)} cannot be imported here: {_remedy(missing)}")
    return wanted


def _remedy(missing: Sequence[Framework]) -> str:
    reason = lacks_tensorflow() if "tensorflow" in missing else ""
    wanted = ["jax"] if reason else missing
    command = f'run %pip install "nbdist[{",".join(wanted)}]"'
    if not reason:
        return command
    return f"{reason}. For JAX, {command}" if "jax" in missing else reason


def check(request: ClusterRequest, worker_memory_bytes: int) -> None:
    """Check that a request can be started.

    Args:
        request: the request.
        worker_memory_bytes: the memory that one engine needs.

    Raises:
        UsageError: the request has faults. The message contains one line for each.
    """
    faults = [
        f"env {name!r}={value!r}: both must be text"
        for name, value in request.env.items()
        if not (isinstance(name, str) and isinstance(value, str))
    ]
    numbers = [getattr(request, option.field) for option in _NUMBERS]
    can_compare = not faults and all(type(number) is int for number in numbers)
    for option, number in zip(_NUMBERS, numbers, strict=True):
        faults += option.faults(number)
    if not can_compare:
        raise UsageError("\n".join(faults))
    faults += _too_many(request, worker_memory_bytes)
    here = sum(not host.name for host in request.hosts)
    if request.min_hosts > len(request.hosts):
        faults.append(f"--min-hosts {request.min_hosts}: use 1 to {len(request.hosts)}")
    cores = len(os.sched_getaffinity(0))
    if here and request.cpus_per_worker > cores:
        faults.append(
            f"--cpus-per-worker {request.cpus_per_worker}: use 1 to {cores} (the cores of this "
            "machine)"
        )
    gpus = len(visible_gpus()) if here else 0
    if request.communication not in _COMMUNICATIONS:
        choices = ", ".join(_COMMUNICATIONS)
        faults.append(f"--communication {request.communication}: choose from {choices}")
    if request.communication == "nccl" and here and not gpus:
        faults.append("--communication nccl needs NVIDIA GPUs, and none is visible: use ring")
    if gpus and here * request.devices_per_host > gpus:
        faults.append(
            f"{here} hosts x --devices-per-host {request.devices_per_host} need "
            f"{here * request.devices_per_host} GPUs, and {gpus} are visible"
        )
    faults += _install_faults(request)
    faults += _tpu_faults(request)
    if faults:
        raise UsageError("\n".join(faults))


def _install_faults(request: ClusterRequest) -> Iterator[str]:
    if not request.install:
        return
    if request.batch is not None or request.is_local:
        yield "--install: only for hosts over ssh, as in %dist_start gpu1 gpu2 --install"
    elif not find_uv():
        yield '--install needs uv: run %pip install "nbdist[install]"'


def _tpu_faults(request: ClusterRequest) -> Iterator[str]:
    place = request.tpu
    if place is None:
        return
    if not tpu_slices.is_whole(request.hosts):
        yield (
            f"{len(request.hosts)} hosts of the TPU ({place.accelerator}) were requested, and it "
            f"runs on all of its {place.slices * place.workers} hosts in their order: use "
            f"%dist_start {tpu_slices.NAME}"
        )
    if request.min_hosts:
        yield f"--min-hosts {request.min_hosts}: a TPU slice runs on all of its hosts: leave it out"
    if request.devices_per_host:
        yield (
            f"--devices-per-host {request.devices_per_host}: a worker uses all TPU chips of its "
            "host: leave it out"
        )


def _too_many(request: ClusterRequest, worker_memory_bytes: int) -> Iterator[str]:
    memory = psutil.virtual_memory().available
    fitting = max(1, memory // worker_memory_bytes)
    engines = sum(not host.name for host in request.hosts) + request.spares * request.is_local
    if engines > fitting:
        spares = f" and {request.spares} spare" if request.spares else ""
        needed, free = engines * worker_memory_bytes / 1e9, memory / 1e9
        yield (
            f"{len(request.hosts)} hosts{spares} need about {needed:,.1f} GB here, and "
            f"{free:,.1f} GB are free: use at most {fitting}"
        )


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `K=V` words. A value with spaces is quoted: `"K=V W"`.

    Raises:
        UsageError: words have no `=` or no name. The message lists them.
    """
    pairs = [pair[1:-1] if pair[:1] in "'\"" and pair[-1:] == pair[:1] else pair for pair in pairs]
    bad = [pair for pair in pairs if "=" not in pair or pair.startswith("=") or "\0" in pair]
    if bad:
        raise UsageError(f"--env {' '.join(map(repr, bad))}: use NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def divide_gpus(gpus: Sequence[str], counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Divide the GPUs of a host among its engines.

    Args:
        gpus: the visible GPUs.
        counts: the number of GPUs for each engine. Engines with 0 divide the others evenly, and the
            first of them take the remainder.

    Returns:
        The GPUs of each engine. If there are fewer GPUs than engines and no count is set, engines
        share them round-robin, and none computes on the CPU.
    """
    if not gpus:
        return [()] * len(counts)
    if len(gpus) < len(counts) and not any(counts):
        return [(gpus[place % len(gpus)],) for place in range(len(counts))]
    free, open_places = len(gpus) - sum(counts), counts.count(0)
    shares, before = [], 0
    for count in counts:
        shares.append(count or free // open_places + (before < free % open_places))
        before += not count
    starts = [sum(shares[:place]) for place in range(len(shares))]
    return [tuple(gpus[start : start + share]) for start, share in zip(starts, shares, strict=True)]


def share_cores(cores: Sequence[int], before: int, each: int) -> tuple[int, ...]:
    """Return the cores that an engine is pinned to, dealt round-robin to the engines of a host.

    Args:
        cores: the cores of the host.
        before: the number of engines on the host with a lower place.
        each: the number of cores for each engine.
    """
    return tuple(sorted({cores[(before * each + i) % len(cores)] for i in range(each)}))
