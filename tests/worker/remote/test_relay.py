"""Streams of large pushed objects between ranks, within one process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.errors import TransferError
from nbdist.utils.tls import new_secret, tls_context
from nbdist.worker.remote import relay
from nbdist.worker.remote.relay import Incoming, Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOOPBACK = "127.0.0.1"
ARRAY = np.random.default_rng(0).normal(size=1_000_000)
CONTENT = pickle.dumps({"x": ARRAY, "y": 1}, 5)
SECRET = new_secret()


class Notebook:
    """Server that sends `CONTENT` from the offset that each connection asks for.

    It stands for the server of the notebook, which `cluster` contains.
    """

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self.url = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        tls = tls_context(SECRET, is_server=True)
        while True:
            try:
                link, offset = relay.secured(self._listener.accept()[0], tls)
            except OSError:
                return
            self.offsets.append(offset)
            with link:
                link.sendall(CONTENT[offset:])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    yield notebook
    notebook.close()


def route(notebook: Notebook, **fields: str) -> Route:
    return Route("push", len(CONTENT), notebook=notebook.url, secret=SECRET, **fields)


def read(stream: Incoming) -> dict[str, object]:
    """Read the objects and check that they are those of the pickle."""
    found: dict[str, object] = pickle.Unpickler(io.BufferedReader(stream)).load()
    np.testing.assert_array_equal(found["x"], ARRAY)
    assert stream.offset == len(CONTENT)
    return found


def test_a_rank_passes_on_what_it_receives(notebook: Notebook) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        onward = relay._Onward(listener, tls_context(SECRET, is_server=True))
        digests = {}

        def second() -> None:
            with Incoming(route(notebook, previous=f"{LOOPBACK}:{port}")) as stream:
                read(stream)
                digests[1] = stream.digest.digest()
                assert not stream.fault

        thread = threading.Thread(target=second)
        thread.start()
        with Incoming(route(notebook), onward) as stream:
            read(stream)
            digests[0] = stream.digest.digest()
        onward.end()
        thread.join(30)
    assert digests == dict.fromkeys((0, 1), hashlib.sha256(CONTENT).digest())
    assert notebook.offsets == [0], "the notebook has sent it once"


def ends_early(listener: socket.socket) -> None:
    """Send a part of the pickle, and close the connection."""
    link, _ = relay.secured(listener.accept()[0], tls_context(SECRET, is_server=True))
    with link:
        link.sendall(CONTENT[:3_000_001])


def refuses(listener: socket.socket) -> None:
    """Close the connection at once."""
    listener.accept()[0].close()


def is_a_stranger(listener: socket.socket) -> None:
    """Send other objects with another secret."""
    tls = tls_context(new_secret(), is_server=True)
    with pytest.raises(OSError, match=r"TLS|SSL|reset|closed"):
        relay.secured(listener.accept()[0], tls)


@pytest.mark.parametrize("rank", [ends_early, refuses, is_a_stranger])
def test_the_notebook_sends_the_rest_after_a_fault_of_a_rank(
    notebook: Notebook, rank: Callable[[socket.socket], None]
) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=rank, args=(listener,))
        thread.start()
        previous = f"{LOOPBACK}:{listener.getsockname()[1]}"
        with Incoming(route(notebook, previous=previous)) as stream:
            read(stream)
            assert stream.fault
        thread.join(10)
    (offset,) = notebook.offsets
    assert (offset == 0) == (rank is not ends_early)


def test_a_notebook_that_ends_is_an_error(notebook: Notebook) -> None:
    lost = route(notebook)
    notebook.close()
    with Incoming(lost) as stream, pytest.raises(TransferError, match="the notebook sends no more"):
        read(stream)


def test_a_rank_that_no_rank_follows_does_not_wait(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CONNECT_S", 0.1)
    with socket.create_server((LOOPBACK, 0)) as listener:
        onward = relay._Onward(listener, tls_context(SECRET, is_server=True))
        with Incoming(route(notebook), onward) as stream:
            read(stream)
        onward.end()
