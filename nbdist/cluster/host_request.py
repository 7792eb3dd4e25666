"""Validation of requests to a scheduler, and placeholders for the hosts that it provides."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.cluster import inventory
from nbdist.cluster.schedulers.dialects import SCHEDULERS, seconds
from nbdist.errors import StartError, UsageError
from nbdist.records import Batch, Host, options_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import ClusterRequest

_OPTIONS = options_of(Batch)
LAUNCHERS = _OPTIONS["launcher"].choices
KUBERNETES = "kubernetes"

_QUEUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@-]*", re.ASCII)
_TIME = re.compile(r"[0-9][0-9:-]*", re.ASCII)
_REMEDIES = {"time": "use the format 2:00:00"}
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", re.ASCII)
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", re.ASCII)
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - refused
_CONVERTED_TIMES = ("lsf", KUBERNETES)
"""Launchers for which nbdist converts `--time` to their own units."""


def chosen(hosts: object, batch: Batch | None) -> tuple[Host, ...]:
    """Return the hosts of a Python call.

    Raises:
        UsageError: the request is invalid.
    """
    return inventory.of(hosts) if batch is None else hosts_of(hosts, batch)


def resized(request: ClusterRequest, hosts: object) -> ClusterRequest:
    """Return the request with other hosts.

    Raises:
        UsageError: the hosts are invalid.
    """
    batch = request.batch
    asked = inventory.resized(request.hosts, hosts) if batch is None else hosts_of(hosts, batch)
    return structs.replace(request, hosts=asked)


def hosts_of(count: object, batch: Batch) -> tuple[Host, ...]:
    """Return placeholders for hosts of a scheduler, whose real names are not known yet.

    Raises:
        UsageError: the count is not a positive number, or the request has faults. The message
            contains one line for each fault.
    """
    if type(count) is not int:
        raise UsageError(
            f"{batch.launcher} chooses the hosts: use a number of hosts, and select hosts with "
            'its own options, as in --sbatch "--nodelist=gpu1,gpu2"'
        )
    if count < 1:
        raise UsageError(f"need at least 1 host, got {count}")
    if faults := list(_faults(batch)):
        raise UsageError("\n".join(faults))
    return tuple(Host(name=f"{batch.launcher}-{n}", python=batch.python) for n in range(count))


def _faults(batch: Batch) -> Iterator[str]:
    launcher = batch.launcher
    if launcher not in LAUNCHERS:
        yield f"--launcher {launcher}: choose from {', '.join(LAUNCHERS)}"
        return
    yield from malformed(batch)
    if batch.listen in _WILDCARDS:
        yield f"--listen {batch.listen}: use one address of this machine that hosts can reach"
    yield from _OPTIONS["gpus_per_host"].faults(batch.gpus)
    for line in batch.options:
        if not line.strip() or not line.isprintable():
            yield f"--submit {line!r}: use options of the scheduler, on one line"
        elif launcher == "mpi" and not _are_words(line):
            yield f"--submit {line!r}: close the quote"
    yield from _unsupported(batch)
    if launcher == KUBERNETES and not batch.image:
        yield "--launcher kubernetes needs --image with Python, nbdist and the framework"
    if batch.pod and not Path(batch.pod).expanduser().is_file():
        yield f"--pod {batch.pod}: file not found"


def malformed(batch: Batch) -> Iterator[str]:
    """Yield a fault for each option of a batch whose text has another form."""
    forms = {
        "partition": _QUEUE,
        "time": _TIME,
        "listen": inventory.ADDRESS,
        "python": inventory.PATH,
        "image": _IMAGE,
        "namespace": _NAMESPACE,
    }
    for name, form in forms.items():
        option = _OPTIONS[name]
        value = getattr(batch, option.field)
        if value and not form.fullmatch(value):
            yield f"{option.flag} {value!r}: {_REMEDIES.get(name, 'invalid characters')}"
    if batch.time and _TIME.fullmatch(batch.time) and batch.launcher in _CONVERTED_TIMES:
        try:
            seconds(batch.time)
        except StartError as error:
            yield str(error)


def _are_words(line: str) -> bool:
    try:
        return bool(shlex.split(line))
    except ValueError:
        return False


def _unsupported(batch: Batch) -> Iterator[str]:
    """Yield a fault for each option that the launcher does not support."""
    scheduler = SCHEDULERS.get(batch.launcher)
    is_kubernetes = batch.launcher == KUBERNETES
    uses = {
        "partition": scheduler is not None and scheduler.queue,
        "time": is_kubernetes or (scheduler is not None and scheduler.time),
        "gpus_per_host": is_kubernetes or scheduler is not None,
        "submit": not is_kubernetes,
        "image": is_kubernetes,
        "namespace": is_kubernetes,
        "pod": is_kubernetes,
    }
    for name, has_use in uses.items():
        option = _OPTIONS[name]
        if getattr(batch, option.field) and not has_use:
            yield f"{option.flag}: not supported by {batch.launcher}"
    if batch.kind != "job":
        yield f"kind {batch.kind}: only for exported programs"
