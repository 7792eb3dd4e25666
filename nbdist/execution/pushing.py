"""Binding of pushed objects on ranks, also again after a recovery.

Small objects are sent to each rank. Large ones are in a file. Ranks on the notebook's machine read
the file. Ranks on other hosts form a chain: the notebook sends the file to the first one, and each
rank passes it on while it arrives.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.cluster.child_registry import HOME
from nbdist.cluster.payload_server import PayloadServer
from nbdist.errors import TransferError, WorkerError
from nbdist.utils.signals import interrupt_held
from nbdist.utils.sockets import url_host
from nbdist.views import formatting
from nbdist.views.cluster.workers import StartView
from nbdist.worker.remote import relay, transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from nbdist.cluster.engines import Engines
    from nbdist.execution.replay_journal import Journal
    from nbdist.utils.spool import Spool

_DISCARD_S = 5.0
"""Time to wait until ranks have dropped the objects of a failed push. Busy ranks do so later."""


def push(
    engines: Engines, journal: Journal, names: Iterable[str], spool: Spool, ranks: Sequence[int]
) -> None:
    """Bind pickled objects on ranks, and add them to the journal. Show the progress if it is large.

    Args:
        engines: the engines of all ranks.
        journal: the earlier cells and pushed objects.
        names: the names of the objects.
        spool: the pickle of the objects by name.
        ranks: the ranks to copy to.

    Raises:
        TransferError: a rank died, cannot create an object, or received other bytes.
    """
    payload = spool.path if spool.is_file else spool.content()

    def note() -> None:
        journal.add_push(names, payload, ranks)
        spool.keep()

    try:
        if isinstance(payload, bytes):
            bind(engines, payload, ranks, bound=note)
            return
        title = f"{formatting.size(spool.size)} to {formatting.count(len(ranks), 'worker')}"
        with StartView(f"nbdist: copying {title}") as view:
            view.run("copied", lambda: bind(engines, payload, ranks, view.show_message, note))
            view.finish(f"nbdist: copied {title}", ())
    except WorkerError as error:
        raise TransferError(str(error)) from None


def bind(
    engines: Engines,
    payload: bytes | Path,
    ranks: Sequence[int],
    show_message: Callable[[str], None] = lambda _: None,
    bound: Callable[[], None] = lambda: None,
) -> str:
    """Bind pickled objects on ranks. Large ones are bound on all ranks, or on none after a fault.

    Objects of Keras are created in the scope of the strategy if all ranks receive them.

    Args:
        engines: the engines of all ranks.
        payload: the objects by name, pickled, or the file of a large pickle.
        ranks: the ranks to copy to.
        show_message: receives the progress of a large pickle.
        bound: is called when the objects are bound.

    Returns:
        A description of connections between ranks that failed; empty if none did.

    Raises:
        WorkerError, TransferError: a rank died, cannot create an object, or received other bytes.
    """
    if isinstance(payload, bytes):
        _bind_small(engines, payload, ranks)
        bound()
        return ""
    if not payload.is_file():
        raise TransferError(f"{payload} with pushed objects is gone: push them again")
    push = secrets.token_hex(16)
    try:
        received = _Sending(engines, push, payload, show_message).send(ranks)
        with interrupt_held():
            if len(ranks) == engines.world_size and all(each.needs_scope for each in received):
                engines.apply(relay.discard, push, ranks=ranks)
                _bind_small(engines, payload.read_bytes(), ranks)
            else:
                engines.apply(relay.bind, push, ranks=ranks)
            bound()
    except BaseException:
        _discard(engines, push, ranks)
        raise
    faults = zip(ranks, (each.fault for each in received), strict=True)
    texts = [f"rank {rank} ({fault})" for rank, fault in faults if fault]
    return f"sent again by the notebook: {', '.join(texts)}" if texts else ""


def _bind_small(engines: Engines, payload: bytes, ranks: Sequence[int]) -> None:
    in_scope = engines.apply(transfer.put, payload, ranks=ranks)
    if len(ranks) == engines.world_size and all(in_scope):
        engines.apply(transfer.put_in_scope, payload, ranks=ranks)


def _discard(engines: Engines, push: str, ranks: Sequence[int]) -> None:
    """Let ranks drop the objects. Those that still receive do so at their end."""
    dead = engines.dead()
    alive = [rank for rank in ranks if rank not in dead]
    if alive:
        with contextlib.suppress(WorkerError), engines.within(_DISCARD_S):
            engines.apply(relay.discard, push, ranks=alive)


class _Sending:
    """Sending of the file of one push.

    Args:
        engines: the engines of all ranks.
        push: id of the push.
        file: the file.
        show_message: receives the progress.
    """

    def __init__(
        self, engines: Engines, push: str, file: Path, show_message: Callable[[str], None]
    ) -> None:
        self._engines = engines
        self._route = relay.Route(push=push, size=file.stat().st_size)
        self._file = file
        self._show_message = show_message

    def send(self, ranks: Sequence[int]) -> list[relay.Received]:
        """Send the file to ranks. They keep the objects, and bind none.

        Returns:
            The result of each rank, in the order of `ranks`.
        """
        host = self._engines.places.host
        here = replace(self._route, file=str(self._file))
        routes = {rank: here for rank in ranks if host(rank) == HOME}
        away = sorted(ranks - routes.keys(), key=lambda rank: (host(rank), rank))
        if not away:
            return self._engines.apply(relay.receive, routes, ranks=ranks)
        with (
            self._engines.fleet.payload_listener() as listener,
            PayloadServer(listener, self._file) as server,
        ):
            own = replace(self._route, secret=server.secret)
            routes |= self._chain(away, own, listener.port)

            def progress() -> int:
                tenths = 10 * server.sent // own.size
                self._show_message(f"{10 * tenths}% of {formatting.size(own.size)} sent")
                return server.sent

            received: list[relay.Received] = self._engines.apply(
                relay.receive, routes, ranks=ranks, progress=progress
            )
            self._check(dict(zip(ranks, received, strict=True)), away, server.digest())
        return received

    def _chain(self, ranks: Sequence[int], own: relay.Route, port: int) -> dict[int, relay.Route]:
        """Return the routes of ranks that pass the file on, in this order."""
        places, fleet = self._engines.places, self._engines.fleet
        addresses = {rank: places.address(rank) for rank in ranks}
        passing = ranks[:-1]
        ports = self._engines.apply(relay.listen, own.push, addresses, ranks=passing)
        previous = {
            rank: f"{url_host(addresses[before])}:{found}" if isinstance(found, int) else ""
            for rank, before, found in zip(ranks[1:], passing, ports, strict=True)
        }
        return {
            rank: replace(
                own,
                previous=previous.get(rank, ""),
                notebook=fleet.service(places.host(rank), port),
            )
            for rank in ranks
        }

    def _check(
        self, received: dict[int, relay.Received], away: Sequence[int], digest: bytes
    ) -> None:
        wrong = [rank for rank in away if received[rank].digest != digest]
        if wrong:
            raise TransferError(
                f"rank {formatting.ranks(wrong)} received other bytes than the notebook sent: push "
                "again"
            )
