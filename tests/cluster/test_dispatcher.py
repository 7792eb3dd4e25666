"""Sender of cells: ranks that do not connect."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import zmq

from nbdist.cluster.dispatcher import Dispatcher
from nbdist.errors import StartError
from nbdist.records import WATCHDOG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def connected(dispatcher: Dispatcher, names: Iterable[str]) -> Iterator[None]:
    """Connect a rank or a watchdog of each name, and announce it."""
    with contextlib.ExitStack() as opened:
        for name in names:
            socket = opened.enter_context(zmq.Context.instance().socket(zmq.DEALER))
            socket.linger = 0
            socket.identity = name.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = dispatcher.bound_socket.public_key
            socket.connect(f"tcp://127.0.0.1:{dispatcher.bound_socket.port}")
            socket.send(b"")
        yield


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ((), "0-2"),
        (("0", f"{WATCHDOG}0"), "1-2"),
        (("0", f"{WATCHDOG}0", "1", f"{WATCHDOG}2"), "1-2"),
    ],
)
def test_ranks_that_do_not_connect_are_named(names: tuple[str, ...], missing: str) -> None:
    dispatcher = Dispatcher()
    with (
        contextlib.closing(dispatcher),
        connected(dispatcher, names),
        pytest.raises(StartError) as refused,
    ):
        dispatcher.await_connections(range(3), 1.0)
    assert str(refused.value) == (
        f"rank {missing} did not connect within 1 s: set NBDIST_START_TIMEOUT_S to more seconds, "
        "and start the workers again"
    )


def test_ranks_connect_with_their_watchdogs() -> None:
    dispatcher = Dispatcher()
    with (
        contextlib.closing(dispatcher),
        connected(dispatcher, ["0", f"{WATCHDOG}0", "1", f"{WATCHDOG}1"]),
    ):
        dispatcher.await_connections(range(2), 60.0)
