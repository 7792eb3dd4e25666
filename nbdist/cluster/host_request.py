"""What may be asked of a scheduler, and the hosts that it is to give."""

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
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", re.ASCII)
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", re.ASCII)
_ANY = ("0.0.0.0", "::")  # noqa: S104 - refused
_MEASURED = ("lsf", KUBERNETES)
"""Those that are told a time in their own units."""


def chosen(hosts: object, batch: Batch | None) -> tuple[Host, ...]:
    """The hosts as Python's callers ask for them.

    Raises:
        UsageError: they cannot be had so.
    """
    return inventory.of(hosts) if batch is None else hosts_of(hosts, batch)


def resized(request: ClusterRequest, hosts: object) -> ClusterRequest:
    """The same with other hosts, or more or fewer.

    Raises:
        UsageError: they cannot be had so.
    """
    batch = request.batch
    asked = inventory.resized(request.hosts, hosts) if batch is None else hosts_of(hosts, batch)
    return structs.replace(request, hosts=asked)


def hosts_of(count: object, batch: Batch) -> tuple[Host, ...]:
    """So many hosts, each with the name that it has here before anybody knows its own.

    Raises:
        UsageError: it is no number; or the scheduler cannot be asked so, with a line for each
            fault.
    """
    if type(count) is not int:
        raise UsageError(
            f"{batch.launcher} chooses the hosts: type how many, and what they are to be like "
            'in its own words, as in --sbatch "--nodelist=gpu1,gpu2"'
        )
    if count < 1:
        raise UsageError(f"{count} hosts is too few: type a number from 1")
    if faults := list(_faults(batch)):
        raise UsageError("\n".join(faults))
    return tuple(Host(name=f"{batch.launcher}-{n}", python=batch.python) for n in range(count))


def _faults(batch: Batch) -> Iterator[str]:
    launcher = batch.launcher
    if launcher not in LAUNCHERS:
        yield f"--launcher {launcher}: choose from {', '.join(LAUNCHERS)}"
        return
    yield from _misspelt(batch)
    if batch.listen in _ANY:
        yield f"--listen {batch.listen}: type the one address that hosts connect to"
    yield from _OPTIONS["gpus_per_host"].faults(batch.gpus)
    for line in batch.options:
        if not line.strip() or not line.isprintable():
            yield f"--submit {line!r}: type words for the scheduler, on one line"
        elif launcher == "mpi" and not _are_words(line):
            yield f"--submit {line!r}: a quote is not closed"
    yield from _needless(batch)
    if launcher == KUBERNETES and not batch.image:
        yield "--launcher kubernetes needs --image: one that has Python, nbdist and the framework"
    if batch.pod and not Path(batch.pod).expanduser().is_file():
        yield f"--pod {batch.pod}: there is no such file"


def _misspelt(batch: Batch) -> Iterator[str]:
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
            yield f"{option.flag} {value!r}: it has signs that do not belong there"
    if batch.time and _TIME.fullmatch(batch.time) and batch.launcher in _MEASURED:
        try:
            seconds(batch.time)
        except StartError as error:
            yield str(error)


def _are_words(line: str) -> bool:
    try:
        return bool(shlex.split(line))
    except ValueError:
        return False


def _needless(batch: Batch) -> Iterator[str]:
    """What this one has no use for."""
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
            yield f"{option.flag}: {batch.launcher} has no such thing"
