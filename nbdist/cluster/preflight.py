"""Looks at the hosts before a run, all at once, within seconds."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.cluster import diagnosis
from nbdist.errors import StartError, UsageError, WorkerError
from nbdist.records import Examination, Reach, Trouble
from nbdist.views import formatting
from nbdist.worker.remote import preflight as rank_preflight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.cluster.engines import Engines
    from nbdist.records import ClusterRequest, HostFacts

BOUND_S = 5.0
"""For what all ranks are asked at once."""


def examine(
    engines: Engines, request: ClusterRequest, *, measure: bool, data: str = "", folder: str = ""
) -> Examination:
    """Look at the hosts of all ranks, and at the network between them.

    Args:
        engines: none is in a cell.
        request: what was asked for.
        measure: also how fast each rank sends to the next.
        data: a pattern of files that all hosts should have alike.
        folder: of checkpoints, which all hosts should share.

    Raises:
        WorkerError: a rank did not answer in time, or died.
    """
    began = time.monotonic()
    addresses = [engines.places.address(rank) for rank in range(engines.world_size)]
    with engines.within(BOUND_S):
        asked_at = time.time()
        facts = tuple(map(_named, engines.apply(rank_preflight.facts), _keys(engines)))
        answered_at = time.time()
        reaches = _reaches(engines, addresses, measure=measure)
        troubles = [
            *_data(engines, data),
            *_folder(engines, folder),
        ]
    middle, error = (asked_at + answered_at) / 2, (answered_at - asked_at) / 2
    skew = {one.rank: one.time_s - middle for one in facts}
    told = {rank: s if abs(s) > error else 0.0 for rank, s in skew.items()}
    found = diagnosis.find(facts, addresses, reaches, told, request)
    return Examination(
        facts=facts,
        reaches=reaches,
        skew_s=skew,
        skew_error_s=error,
        troubles=tuple(sorted((*troubles, *found), key=lambda trouble: not trouble.is_fatal)),
        seconds=time.monotonic() - began,
    )


def check(engines: Engines, request: ClusterRequest) -> str:
    """Before collectives are wired: what is fatal ends the start, and the rest is told.

    Returns:
        What was found, in words.

    Raises:
        StartError: with one line for each fatal trouble.
    """
    try:
        examination = examine(engines, request, measure=False)
    except WorkerError as error:
        return f"not all could be looked at: {error}"
    fatal = [trouble for trouble in examination.troubles if trouble.is_fatal]
    if fatal:
        raise StartError("\n".join(map(in_words, fatal)))
    return "; ".join(map(in_words, examination.troubles)) or "all well"


def in_words(trouble: Trouble) -> str:
    """A trouble in a line."""
    return f"{trouble.where}: {trouble.what}: {trouble.advice}"


def require_shared(engines: Engines, folder: str) -> None:
    """Raises UsageError where ranks on several hosts do not share the folder of checkpoints."""
    if len({*_keys(engines)}) > 1:
        for trouble in _folder(engines, folder):
            raise UsageError(f"--checkpoint {folder}: {in_words(trouble)}")


def _keys(engines: Engines) -> list[str]:
    return [engines.places.host(rank) for rank in range(engines.world_size)]


def _named(facts: HostFacts, key: str) -> HostFacts:
    """Hosts may have the same name for themselves: what was typed tells them apart."""
    return structs.replace(facts, host=key or facts.host)


def _reaches(
    engines: Engines, addresses: Sequence[str], *, measure: bool
) -> dict[int, tuple[Reach, ...]]:
    if engines.world_size == 1:
        return {}
    token = secrets.token_hex(16)
    ports = engines.apply(rank_preflight.open_ports, list(addresses), token)
    ends = {
        rank: (address, port)
        for rank, (address, port) in enumerate(zip(addresses, ports, strict=True))
        if isinstance(port, int)
    }
    reached = engines.apply(rank_preflight.reach, ends, token, measure)
    engines.apply(rank_preflight.close_ports)
    closed = {rank: port for rank, port in enumerate(ports) if isinstance(port, str)}
    return {
        rank: (*found, *(Reach(other, fault=why) for other, why in closed.items() if other != rank))
        for rank, found in enumerate(reached)
    }


def _data(engines: Engines, pattern: str) -> list[Trouble]:
    """Of files that hosts do not have alike."""
    if not pattern:
        return []
    found = engines.apply(rank_preflight.files, pattern)
    hosts = [key or "this machine" for key in _keys(engines)]
    troubles = [
        Trouble(
            where=host,
            what=f"{formatting.count(len(unread), 'file')} cannot be read: {unread[0]}",
            advice="see to its mode and owner",
            is_fatal=True,
        )
        for host, (_, _, unread) in zip(hosts, found, strict=True)
        if unread
    ]
    kinds = {(count, size) for count, size, _ in found}
    if len(kinds) > 1 or (0, 0) in kinds:
        said = "; ".join(
            f"{host} has {formatting.count(count, 'file')} ({formatting.size(size)})"
            for host, (count, size, _) in zip(hosts, found, strict=True)
        )
        differ = f"the files of {pattern} differ: {said}"
        troubles.append(
            Trouble(
                where=", ".join(dict.fromkeys(hosts)),
                what=differ if len(kinds) > 1 else f"there are no files {pattern}",
                advice="copy them to all hosts, or name a folder that all share",
                is_fatal=True,
            )
        )
    return troubles


def _folder(engines: Engines, folder: str) -> list[Trouble]:
    """Of a folder that hosts should share."""
    if not folder:
        return []
    mark = f".nbdist-{secrets.token_hex(8)}"
    why = engines.apply(rank_preflight.leave_mark, folder, mark, ranks=[0])[0]
    hosts = [key or "this machine" for key in _keys(engines)]
    if why:
        what, advice = f"{folder} cannot be written to: {why}", "name another"
        return [Trouble(where=hosts[0], what=what, advice=advice, is_fatal=True)]
    try:
        sees = engines.apply(rank_preflight.sees_mark, folder, mark)
    finally:
        engines.apply(rank_preflight.remove_mark, folder, mark)
    blind = [host for host, there in zip(hosts, sees, strict=True) if not there]
    if not blind:
        return []
    what = f"{folder} is not the folder that {hosts[0]} writes to"
    where, advice = ", ".join(dict.fromkeys(blind)), "name a folder that all hosts share"
    return [Trouble(where=where, what=what, advice=advice, is_fatal=True)]
