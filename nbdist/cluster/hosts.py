"""Which hosts were asked for, and what each of their engines may use."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import ClusterRequest, Communication, Framework

FRAMEWORKS: tuple[Framework, ...] = ("tensorflow", "jax")
FRAMEWORK_CHOICES = ("tensorflow", "jax", "both")
COMMUNICATION_CHOICES: tuple[Communication, ...] = ("auto", "ring", "nccl")
_NVIDIA_SMI_TIMEOUT_S = 10


def count_hosts(words: Sequence[str], number: int | None) -> int:
    """The number of hosts in `4 hosts`, `4` or `-n 4`.

    Raises:
        UsageError: nothing, or something else, was named.
    """
    named = [word for word in words if word not in ("host", "hosts")]
    if number is not None and not named:
        return number
    if len(named) == 1 and number is None and named[0].removeprefix("-").isdecimal():
        return int(named[0])
    if not named:
        raise UsageError("how many hosts? Type %dist_start 4 hosts")
    if number is not None:
        raise UsageError(
            f"-n {number} and {' '.join(named)!r} both say which hosts: type one of them"
        )
    raise UsageError(
        f"unknown hosts {' '.join(named)!r}: this version starts engines on this machine only; "
        "type their number, as in %dist_start 4 hosts"
    )


def choose_frameworks(choice: str | None) -> tuple[Framework, ...]:
    """The frameworks to load: those named, or all that are installed.

    Raises:
        UsageError: one is not installed, or there is no such framework.
    """
    if choice is not None and choice not in FRAMEWORK_CHOICES:
        raise UsageError(
            f"unknown framework {choice!r}: choose from {', '.join(FRAMEWORK_CHOICES)}"
        )
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if choice is None and installed:
        return tuple(installed)
    wanted = FRAMEWORKS if choice in (None, "both") else tuple(n for n in FRAMEWORKS if n == choice)
    missing = [name for name in wanted if name not in installed]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} cannot be imported here: "
            f'type %pip install "nbdist[{",".join(missing)}]"'
        )
    return wanted


def check(request: ClusterRequest, worker_memory_bytes: int) -> None:
    """Refuse what cannot be started, every reason at once.

    Raises:
        UsageError: with one line for each fault.
    """
    faults = [
        f"{name} {value!r}: type a whole number"
        for name, value in (
            ("hosts", request.hosts),
            ("devices_per_host", request.devices_per_host),
            ("cpus_per_worker", request.cpus_per_worker),
            ("spares", request.spares),
        )
        if type(value) is not int
    ]
    faults += [
        f"env {name!r}={value!r}: both must be text"
        for name, value in request.env.items()
        if not (isinstance(name, str) and isinstance(value, str))
    ]
    if faults:
        raise UsageError("\n".join(faults))
    faults += _too_many(request, worker_memory_bytes)
    cores = len(os.sched_getaffinity(0))
    if not 0 <= request.cpus_per_worker <= cores:
        faults.append(
            f"--cpus-per-worker {request.cpus_per_worker}: this machine gives 1 to {cores} cores"
        )
    if request.devices_per_host < 0:
        faults.append(f"--devices-per-host {request.devices_per_host}: type a number from 1")
    gpus = len(visible_gpus())
    if request.communication not in COMMUNICATION_CHOICES:
        choices = ", ".join(COMMUNICATION_CHOICES)
        faults.append(f"--communication {request.communication}: choose from {choices}")
    if request.communication == "nccl" and not gpus:
        faults.append("--communication nccl needs NVIDIA GPUs, and none is visible: type ring")
    if gpus and request.hosts * request.devices_per_host > gpus:
        faults.append(
            f"{request.hosts} hosts x --devices-per-host {request.devices_per_host} need "
            f"{request.hosts * request.devices_per_host} GPUs, and {gpus} are visible"
        )
    if faults:
        raise UsageError("\n".join(faults))


def _too_many(request: ClusterRequest, worker_memory_bytes: int) -> Iterator[str]:
    memory = psutil.virtual_memory().available
    fitting = max(1, memory // worker_memory_bytes)
    engines = request.hosts + request.spares
    if request.hosts < 1:
        yield f"{request.hosts} hosts is too few: type a number from 1"
    elif request.spares < 0:
        yield f"--spares {request.spares}: type a number from 0"
    elif engines > fitting:
        spares = f" and {request.spares} spare" if request.spares else ""
        yield (
            f"{request.hosts} hosts{spares} need about {engines * worker_memory_bytes / 1e9:,.1f} "
            f"GB here, and {memory / 1e9:,.1f} GB are free: type a number up to {fitting}"
        )


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """`K=V` words as a dict; a value with spaces is typed as `"K=V W"`.

    Raises:
        UsageError: a word has no `=` or no name; all such words are named.
    """
    pairs = [pair[1:-1] if pair[:1] in "'\"" and pair[-1:] == pair[:1] else pair for pair in pairs]
    bad = [pair for pair in pairs if "=" not in pair or pair.startswith("=") or "\0" in pair]
    if bad:
        raise UsageError(f"--env {' '.join(map(repr, bad))}: type NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return tuple(word.strip() for word in allowed.split(",") if word.strip() not in ("", "-1"))
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ()
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()


def divide_gpus(gpus: Sequence[str], hosts: int, each: int) -> list[tuple[str, ...]]:
    """Give every local engine GPUs of its own.

    Args:
        gpus: the visible GPUs.
        hosts: number of engines.
        each: GPUs for each engine; 0 divides them evenly, the first engines taking the rest.

    Returns:
        The GPUs of each rank. With fewer GPUs than engines they are shared in turn, so that no
        rank is left on the CPU while others compute on a GPU.
    """
    if not gpus:
        return [()] * hosts
    if len(gpus) < hosts and not each:
        return [(gpus[rank % len(gpus)],) for rank in range(hosts)]
    shares = [each or len(gpus) // hosts + (rank < len(gpus) % hosts) for rank in range(hosts)]
    starts = [sum(shares[:rank]) for rank in range(hosts)]
    return [tuple(gpus[start : start + share]) for start, share in zip(starts, shares, strict=True)]


def divide_cores(hosts: int, each: int) -> list[tuple[int, ...]]:
    """The cores that each engine stays on, in turn; empty when there is no limit."""
    if not each:
        return [()] * hosts
    cores = sorted(os.sched_getaffinity(0))
    return [
        tuple(sorted(cores[(rank * each + i) % len(cores)] for i in range(each)))
        for rank in range(hosts)
    ]


def resident_bytes(pid: int) -> int:
    """How much memory a process takes; 0 when it is gone."""
    try:
        size: int = psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0
    return size
