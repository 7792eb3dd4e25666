"""Preflight check of all hosts and their network, in parallel and within seconds."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from nbdist.cluster import diagnosis
from nbdist.errors import StartError, UsageError, WorkerError
from nbdist.records import Examination, Reach, Trouble
from nbdist.utils import distributions
from nbdist.views import formatting
from nbdist.worker.remote import preflight as rank_preflight

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from nbdist.cluster.engines import Engines
    from nbdist.records import ClusterRequest, HostFacts

BOUND_S = 5.0
"""Limit of each call on all ranks, in seconds."""

Links = Literal["none", "next", "each"]
_LISTEN_S = 10.0


def examine(
    engines: Engines,
    request: ClusterRequest,
    *,
    links: Links = "none",
    data: str = "",
    folder: str = "",
    modules: Collection[str] = (),
) -> Examination:
    """Examine the hosts of all ranks, and the network between them.

    Args:
        engines: the engines. None of them may be running a cell.
        request: the request for the cluster.
        links: the links whose bandwidth is measured: `"next"` from each rank to the next, or
            `"each"` from each host to each other host.
        data: a glob pattern of files that should be equal on all hosts; empty for no check.
        folder: the folder of checkpoints that all hosts should share; empty for no check.
        modules: modules at the top level whose packages should be those of this process.

    Raises:
        WorkerError: a rank did not respond in time, or died.
    """
    began = time.monotonic()
    addresses = [engines.places.address(rank) for rank in range(engines.world_size)]
    with engines.within(BOUND_S):
        asked_at = time.time()
        facts = tuple(map(_named, engines.apply(rank_preflight.facts), _keys(engines)))
        answered_at = time.time()
        reaches = _reaches(engines, addresses, links)
        troubles = [
            *_data(engines, data),
            *_folder(engines, folder),
            *_packages(engines, facts, modules, is_synced=request.sync is not None),
        ]
    middle, error = (asked_at + answered_at) / 2, (answered_at - asked_at) / 2
    skew = {one.rank: one.time_s - middle for one in facts}
    significant = {rank: s if abs(s) > error else 0.0 for rank, s in skew.items()}
    found = diagnosis.find(facts, addresses, reaches, significant, request)
    return Examination(
        facts=facts,
        reaches=reaches,
        skew_s=skew,
        skew_error_s=error,
        troubles=tuple(sorted((*troubles, *found), key=lambda trouble: not trouble.is_fatal)),
        seconds=time.monotonic() - began,
    )


def check(engines: Engines, request: ClusterRequest) -> str:
    """Check the hosts before the collectives are connected.

    Returns:
        A description of the problems that are not fatal.

    Raises:
        StartError: there are fatal problems. The message contains one line for each.
    """
    try:
        examination = examine(engines, request)
    except WorkerError as error:
        return f"not all hosts could be checked: {error}"
    fatal = [trouble for trouble in examination.troubles if trouble.is_fatal]
    if fatal:
        raise StartError("\n".join(map(in_words, fatal)))
    return "; ".join(map(in_words, examination.troubles)) or "no problems"


def in_words(trouble: Trouble) -> str:
    """Describe a problem in one line."""
    return f"{trouble.where}: {trouble.what}: {trouble.advice}"


def require_shared(engines: Engines, folder: str) -> None:
    """Raise UsageError if ranks on several hosts do not share the folder of checkpoints."""
    if len({*_keys(engines)}) > 1:
        for trouble in _folder(engines, folder):
            raise UsageError(f"--checkpoint {folder}: {in_words(trouble)}")


def _keys(engines: Engines) -> list[str]:
    return [engines.places.host(rank) for rank in range(engines.world_size)]


def _named(facts: HostFacts, key: str) -> HostFacts:
    """Set the requested name as the host's name, because hosts may report equal names."""
    return structs.replace(facts, host=key or facts.host)


def _reaches(
    engines: Engines, addresses: Sequence[str], links: Links
) -> dict[int, tuple[Reach, ...]]:
    if engines.world_size == 1:
        return {}
    senders = list(range(engines.world_size))
    if links == "each":
        keys = _keys(engines)
        senders = [rank for rank in senders if keys.index(keys[rank]) == rank]
    rounds = {"none": 0, "next": min(1, len(senders) - 1), "each": len(senders) - 1}[links]
    token = secrets.token_hex(16)
    seconds = _LISTEN_S + 2 * rounds * BOUND_S
    ports = engines.apply(rank_preflight.open_ports, list(addresses), token, seconds)
    ends = {
        rank: (address, port)
        for rank, (address, port) in enumerate(zip(addresses, ports, strict=True))
        if isinstance(port, int)
    }
    reached = engines.apply(rank_preflight.reach, ends, token)
    connected = {
        (rank, one.rank) for rank, ones in enumerate(reached) for one in ones if not one.fault
    }

    def send(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
        receivers = dict(pair for pair in pairs if pair in connected)
        speeds = (
            engines.apply(rank_preflight.bandwidth, receivers, ends, token) if receivers else ()
        )
        return {(rank, receivers[rank]): speeds[rank] for rank in receivers}

    speeds = _measured(senders, rounds, send)
    engines.apply(rank_preflight.close_ports)
    closed = {rank: port for rank, port in enumerate(ports) if isinstance(port, str)}
    return {
        rank: (
            *(structs.replace(one, bytes_per_s=speeds.get((rank, one.rank), 0.0)) for one in found),
            *(Reach(other, fault=why) for other, why in closed.items() if other != rank),
        )
        for rank, found in enumerate(reached)
    }


def _measured(
    senders: Sequence[int],
    rounds: int,
    send: Callable[[Iterable[tuple[int, int]]], dict[tuple[int, int], float]],
) -> dict[tuple[int, int], float]:
    """Measure the bandwidth between ranks, in bytes per second.

    In each round, a rank sends to one rank and receives from another one. Slow links are measured
    again without other traffic of their hosts, and the higher value counts: data that a host
    receives delay the acknowledgements of those that it sends.
    """
    count = len(senders)
    speeds: dict[tuple[int, int], float] = {}
    for distance in range(1, rounds + 1):
        speeds |= send((rank, senders[(i + distance) % count]) for i, rank in enumerate(senders))
    if rounds > 1:
        for pairs in _disjoint(diagnosis.slow_links(speeds)):
            speeds |= {pair: max(speed, speeds[pair]) for pair, speed in send(pairs).items()}
    return speeds


def _disjoint(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs of ranks into rounds. In a round, a rank belongs to one pair."""
    rounds: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        free = (one for one in rounds if not {*pair} & {rank for other in one for rank in other})
        chosen = next(free, None)
        if chosen is None:
            rounds.append([pair])
        else:
            chosen.append(pair)
    return rounds


def _data(engines: Engines, pattern: str) -> list[Trouble]:
    """Return the problems of files that are unreadable, missing or different between hosts."""
    if not pattern:
        return []
    found = engines.apply(rank_preflight.files, pattern)
    hosts = [key or "this machine" for key in _keys(engines)]
    troubles = [
        Trouble(
            where=host,
            what=f"{formatting.count(len(unread), 'file')} cannot be read: {unread[0]}",
            advice="correct its mode or its owner",
            is_fatal=True,
        )
        for host, (_, _, unread) in zip(hosts, found, strict=True)
        if unread
    ]
    kinds = {(count, size) for count, size, _ in found}
    if len(kinds) > 1 or (0, 0) in kinds:
        described = "; ".join(
            f"{host} contains {formatting.count(count, 'file')} ({formatting.size(size)})"
            for host, (count, size, _) in zip(hosts, found, strict=True)
        )
        differ = f"the files of {pattern} differ: {described}"
        troubles.append(
            Trouble(
                where=", ".join(dict.fromkeys(hosts)),
                what=differ if len(kinds) > 1 else f"no files match {pattern}",
                advice="copy the files to all hosts, or use a folder that all hosts share",
                is_fatal=True,
            )
        )
    return troubles


def _packages(
    engines: Engines, facts: Sequence[HostFacts], modules: Collection[str], *, is_synced: bool
) -> Iterator[Trouble]:
    """Yield the problems of the packages that contain modules, and of their requirements.

    Editable installs of the notebook are left out if nbdist sends their files to the hosts.
    """
    needed = distributions.with_requirements(distributions.owners(modules))
    here = distributions.installed()
    ours = {n: here[n] for n in needed - (distributions.editable() if is_synced else set())}
    if ours:
        theirs = engines.apply(distributions.described)
        yield from diagnosis.packages(facts, theirs, ours)


def _folder(engines: Engines, folder: str) -> list[Trouble]:
    """Return the problems of a folder that all hosts should share."""
    if not folder:
        return []
    mark = f".nbdist-{secrets.token_hex(8)}"
    why = engines.apply(rank_preflight.leave_mark, folder, mark, ranks=[0])[0]
    hosts = [key or "this machine" for key in _keys(engines)]
    if why:
        what, advice = f"{folder} is not writable: {why}", "use another folder"
        return [Trouble(where=hosts[0], what=what, advice=advice, is_fatal=True)]
    try:
        sees = engines.apply(rank_preflight.sees_mark, folder, mark)
    finally:
        engines.apply(rank_preflight.remove_mark, folder, mark)
    blind = [host for host, there in zip(hosts, sees, strict=True) if not there]
    if not blind:
        return []
    what = f"{folder} is not the folder that {hosts[0]} writes to"
    where, advice = ", ".join(dict.fromkeys(blind)), "use a folder that all hosts share"
    return [Trouble(where=where, what=what, advice=advice, is_fatal=True)]
