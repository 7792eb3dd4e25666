"""Hosts of the TPU slices to which this machine belongs, and their environment variables.

nbdist finds them as JAX does (jax/_src/clusters/cloud_tpu_cluster.py, JAX 0.10.2): in the variables
of a pod of GKE, else in the attributes of a TPU VM. Ranks are JAX's process ids: the number of the
host in its slice, plus the hosts of the slices before.

Host names of pods are those of JobSet: `<jobset>-<job>-<slice>-<host>.<subdomain>`
(jobset.sigs.k8s.io, concepts).
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.cluster.remote_host import tpu_metadata
from nbdist.cluster.remote_host.ssh_connection import SshConnection
from nbdist.errors import PlanError, StartError, UsageError
from nbdist.planner.hardware import topology
from nbdist.records import Host, TpuPlace
from nbdist.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NAME = "tpu"
"""Word of `%dist_start` for the hosts of this machine's slices."""

PLATFORMS = "tpu,cpu"
"""JAX's platforms on the hosts. With both names, JAX fails on a host whose TPU it cannot use.

Tests without a TPU replace this value by `cpu` (docs/testing.md).
"""

_ADDRESSES, _HOSTNAMES, _WORKER = "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"
_ACCELERATOR, _TOPOLOGY = "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"
_SLICES, _SLICE = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
_COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"
_MEGASCALE = "MEGASCALE_"
_INIT_ARGS = "LIBTPU_INIT_ARGS"
_HERE = ("localhost", "127.0.0.1")
_OLD_PARTS = 3
_MAX_PARALLEL = 32


@dataclass(frozen=True)
class _Slice:
    """One slice, as one of its hosts describes it.

    Attributes:
        hosts: names or addresses of its hosts, in JAX's order.
        worker: number of the host that describes it.
        accelerator: accelerator type; empty if unknown.
        topology: shape in chips; empty if unknown.
        env: variables of MegaScale, and in a pod those of the TPU, without those of a host.
    """

    hosts: tuple[str, ...]
    worker: int
    accelerator: str
    topology: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of slices of the program."""
        return _number(self.env, _SLICES, 1)

    @property
    def index(self) -> int:
        """Number of this slice."""
        return _number(self.env, _SLICE, 0)

    @property
    def coordinator(self) -> str:
        """Host 0 of slice 0, which coordinates several slices; empty for one slice."""
        return self.env.get(_COORDINATOR, "").partition(":")[0]


def find(others: Sequence[str] = (), host: Callable[[str], Host] = Host) -> tuple[Host, ...]:
    """Return the hosts of all slices in the order of JAX's processes, this machine among them.

    Args:
        others: one host of each other slice that this machine cannot find.
        host: converts the name of a host to a record, for `others` and the hosts of slices.

    Raises:
        UsageError: this machine is no host of a TPU slice, its description has faults, or hosts of
            another slice are unknown or do not respond.
    """
    in_pod = bool(os.environ.get(_ADDRESSES) or os.environ.get(_HOSTNAMES))
    own = _of_pod(os.environ) if in_pod else _of_machine(_own_attributes(), os.environ)
    _check(own)
    if others and (in_pod or own.count == 1):
        raise UsageError(
            f"{NAME} already names all hosts of the program's slices: leave out {', '.join(others)}"
        )
    if own.count == 1:
        slices = [own]
    elif in_pod:
        slices = _of_jobset(own)
    else:
        slices = _asked(own, [host(name) for name in _strangers(own, others)])
    return tuple(
        _host(one, number, own, host) for one in slices for number in range(len(one.hosts))
    )


def is_whole(hosts: Sequence[Host]) -> bool:
    """Return True if the hosts are all hosts of their slices, in the order of JAX's processes."""
    places = [host.tpu for host in hosts]
    first = places[0]
    if first is None:
        return not any(places)
    every = [
        structs.replace(first, slice_index=number, worker=worker)
        for number in range(first.slices)
        for worker in range(first.workers)
    ]
    return places == every


def describe(place: TpuPlace) -> str:
    """Describe all slices: `v5litepod-16: 16 x TPU v5e, 15.8 GiB each: 1 slice of 4x4, ...`."""
    times = f"{place.slices} x " if place.slices > 1 else ""
    generation = place.accelerator.rpartition("-")[0]
    for text in (f"{times}{generation}:{place.topology}", f"{times}{place.accelerator}"):
        try:
            return f"{place.accelerator}: {topology.describe(topology.parse(text))}"
        except PlanError:  # a generation or a shape that the catalog does not have
            continue
    shape = f" of {place.topology}" if place.topology else ""
    return f"{times}{place.accelerator or 'a TPU slice'}{shape}"


# Descriptions of a slice.


def _own_attributes() -> dict[str, str]:
    """Return the attributes of this machine.

    Raises:
        UsageError: it has none, and so is no TPU VM.
    """
    remedy = (
        "run the notebook on a host of the slice, or name the hosts, as in %dist_start host1 host2"
    )
    why = f"{_HOSTNAMES} is not set, and "
    if tpu_metadata.SKIPPED in os.environ:
        why += f"{tpu_metadata.SKIPPED} is set, as JAX sets it on machines without a TPU"
        raise UsageError(f"this machine is no host of a TPU slice: {why}: {remedy}")
    try:
        found = tpu_metadata.attributes()
    except OSError as error:
        why += f"Google Cloud's metadata server ({tpu_metadata.server()}) does not respond: {error}"
        raise UsageError(f"this machine is no host of a TPU slice: {why}: {remedy}") from None
    if tpu_metadata.NUMBER not in found:
        why += f"its metadata contains no {tpu_metadata.NUMBER}"
        raise UsageError(f"this machine is no host of a TPU slice: {why}: {remedy}")
    return found


def _of_machine(found: Mapping[str, str], variables: Mapping[str, str]) -> _Slice:
    """Return the slice of a TPU VM. Variables of its environment take precedence, as in JAX.

    Endpoints are host names, or `name:id:address`.
    """
    ends = [end.strip().split(":") for end in found.get(tpu_metadata.ENDPOINTS, "").split(",")]
    odd = [":".join(parts) for parts in ends if not parts[0] or len(parts) not in (1, _OLD_PARTS)]
    if odd:
        raise UsageError(
            f"the metadata server's {tpu_metadata.ENDPOINTS} contains {odd[0]!r}: "
            "expected the names of hosts, or name:id:address"
        )
    rows = (line.partition(":") for line in found.get(tpu_metadata.ENVIRONMENT, "").splitlines())
    known = {name.strip(): value.strip().strip("'") for name, _, value in rows}
    megascale = {n: v for n, v in (known | dict(variables)).items() if n.startswith(_MEGASCALE)}
    return _Slice(
        hosts=tuple(parts[-1] for parts in ends),
        worker=_number(found, tpu_metadata.NUMBER, 0),
        accelerator=found.get(tpu_metadata.ACCELERATOR, known.get("ACCELERATOR_TYPE", "")).strip(),
        topology=known.get("TOPOLOGY", ""),
        env={name: value for name, value in megascale.items() if value},
    )


def _of_pod(variables: Mapping[str, str]) -> _Slice:
    """Return the slice that the variables of a pod describe."""
    ends = (variables.get(_ADDRESSES) or variables[_HOSTNAMES]).split(",")
    shared = {
        name: value
        for name, value in variables.items()
        if name.startswith(("TPU_", _MEGASCALE)) and name != _WORKER and value
    }
    hosts = tuple(end.strip().partition(":")[0] for end in ends)
    if len(hosts) > 1 and not variables.get(_WORKER):
        raise UsageError(f"{_WORKER} is not set: set it to the number of this host in its slice")
    return _Slice(
        hosts=hosts,
        worker=_number(variables, _WORKER, 0),
        accelerator=variables.get(_ACCELERATOR, ""),
        topology=variables.get(_TOPOLOGY, ""),
        env=shared,
    )


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name) or str(default)
    if not text.strip().isdecimal():
        raise UsageError(f"{name} is {text!r} on this TPU host: expected a whole number")
    return int(text)


def _check(found: _Slice) -> None:
    """Refuse the description of a slice whose parts do not fit each other."""
    names = ", ".join(found.hosts)
    repeated = [name for name, times in Counter(found.hosts).items() if times > 1 or not name]
    if repeated:
        raise UsageError(f"{names}: each host of a slice needs one name, and runs one worker")
    if found.worker >= len(found.hosts):
        raise UsageError(f"this is host {found.worker} of its slice, but its hosts are {names}")
    if found.index >= found.count:
        raise UsageError(f"{_SLICE} is {found.index}, but {_SLICES} is {found.count}")
    sides = [int(side) for side in re.findall(r"\d+", found.topology)]
    chips = math.prod(sides)
    if sides and chips % len(found.hosts):
        raise UsageError(
            f"{found.topology} are {chips} chips, which {len(found.hosts)} hosts ({names}) cannot "
            "share: the list of hosts is not complete"
        )


# Other slices.


def _of_jobset(own: _Slice) -> list[_Slice]:
    """Return the slices of a JobSet. Their names follow from those of this slice."""
    forms = [
        re.fullmatch(rf"(.+)-{own.index}(-{number}(?:\..+)?)", name)
        for number, name in enumerate(own.hosts)
    ]
    named = [
        tuple(f"{form[1]}-{number}{form[2]}" for form in forms if form)
        for number in range(own.count)
    ]
    if not all(forms) or named[0][0] != own.coordinator:
        raise UsageError(
            f"the hosts of the other slices are unknown: {', '.join(own.hosts)} and "
            f"{_COORDINATOR}={own.coordinator} are no names of one JobSet: list all hosts in a "
            "file, slice by slice (docs/clusters.md)"
        )
    return [
        replace(own, hosts=hosts, env=_renamed(own, hosts) | {_SLICE: str(number)})
        for number, hosts in enumerate(named)
    ]


def _renamed(own: _Slice, hosts: Sequence[str]) -> dict[str, str]:
    """Return the variables of a pod with the hosts of another slice, and the same ports."""
    lists = {name: own.env[name].split(",") for name in (_ADDRESSES, _HOSTNAMES) if name in own.env}
    return own.env | {
        name: ",".join(
            f"{host}{''.join(end.strip().partition(':')[1:])}"
            for host, end in zip(hosts, ends, strict=True)
        )
        for name, ends in lists.items()
    }


def _strangers(own: _Slice, others: Sequence[str]) -> list[str]:
    """Return a host of each other slice, as far as they are known: the coordinator's, and given."""
    known = [own.coordinator] if own.index and own.coordinator not in others else []
    if 1 + len(known) + len(others) < own.count:
        raise UsageError(
            f"the program has {own.count} slices ({_SLICES}), and this machine finds the hosts of "
            f"{1 + len(known)}: name one host of each other slice, as in %dist_start {NAME} host5"
        )
    return [*known, *others]


def _asked(own: _Slice, hosts: Sequence[Host]) -> list[_Slice]:
    """Ask a host of each other slice for its hosts, over ssh.

    Raises:
        UsageError: a host does not respond, or the slices do not fit each other. The message
            contains one line for each host.
    """

    def attempt(host: Host) -> _Slice | str:
        try:
            found = _of_machine(_ask(host), {})
            _check(found)
        except (StartError, UsageError) as error:
            return f"{host.key}: {error}"
        return found

    with ThreadPoolExecutor(_MAX_PARALLEL, "nbdist-tpu") as pool:
        answers = list(pool.map(attempt, hosts))
    faults = [answer for answer in answers if isinstance(answer, str)]
    if faults:
        raise UsageError("\n".join(["hosts of other TPU slices cannot be asked:", *faults]))
    slices = {own.index: own} | {one.index: one for one in answers if isinstance(one, _Slice)}
    kinds = {
        (one.count, one.coordinator, one.accelerator, len(one.hosts)) for one in slices.values()
    }
    if sorted(slices) != list(range(own.count)) or len(kinds) > 1:
        described = "\n".join(
            f"  slice {number} of {one.count}: {one.accelerator}, {', '.join(one.hosts)}, "
            f"coordinator {one.coordinator}"
            for number, one in sorted(slices.items())
        )
        raise UsageError(
            f"the slices are not the {own.count} slices of one program:\n{described}\n"
            f"name one host of each other slice, as in %dist_start {NAME} host5"
        )
    return [slices[number] for number in range(own.count)]


def _ask(host: Host) -> dict[str, str]:
    """Return the attributes of another host."""
    program = Path(tpu_metadata.__file__).read_bytes()
    with tempfile.TemporaryDirectory(prefix="nbdist-tpu-") as name:
        folder = Path(name)
        (folder / "log").mkdir()
        link = SshConnection(host, folder, "h", Settings.from_environment().ssh_config)
        try:
            link.open()
            answer: dict[str, str] = json.loads(link.run_python(program))
        finally:
            link.close()
    if tpu_metadata.FAULT in answer:
        raise StartError(answer[tpu_metadata.FAULT])
    return answer


# Hosts of a cluster.


def _host(one: _Slice, number: int, own: _Slice, host: Callable[[str], Host]) -> Host:
    """Return a host of a slice, with the variables that its worker needs.

    libtpu on a TPU VM reads the rest from the metadata server. In a pod it has variables only.
    """
    name = one.hosts[number]
    if (one.index, number) == (own.index, own.worker):
        found = Host(address="" if name in _HERE else name)
    else:
        found = host(name)
    env = {"JAX_PLATFORMS": PLATFORMS, **one.env}
    if _HOSTNAMES in env or _ADDRESSES in env:
        env[_WORKER] = str(number)
    if _INIT_ARGS in os.environ:  # programs of all hosts must be compiled alike
        env[_INIT_ARGS] = os.environ[_INIT_ARGS]
    place = TpuPlace(
        accelerator=one.accelerator,
        topology=one.topology,
        slice_index=one.index,
        slices=one.count,
        worker=number,
        workers=len(one.hosts),
    )
    return structs.replace(found, env=env, tpu=place)
