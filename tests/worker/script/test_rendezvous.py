"""Exchange of addresses between the ranks of a program."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from nbdist.errors import StartError
from nbdist.worker.script import rendezvous
from nbdist.worker.script.placement import Placement
from tests.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


def test_all_ranks_receive_all_addresses(port: int) -> None:
    ranks = [Placement(rank, 3, f"127.0.0.1:{port}") for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(rendezvous.addresses, ranks, [10, 11, 12]))
    assert found == [("127.0.0.1:10", "127.0.0.1:11", "127.0.0.1:12")] * 3


def test_port_in_use_is_reported(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(StartError, match=f"on port {port}"):
        rendezvous.addresses(Placement(0, 2, f"127.0.0.1:{port}"), 1)


def test_missing_ranks_are_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LIMIT_S", 0.1)
    with pytest.raises(StartError, match=r"ranks 1, 2 did not start within 0\.1 s"):
        rendezvous.addresses(Placement(0, 3, f"127.0.0.1:{port}"), 1)
    with pytest.raises(StartError, match="rank 0 did not respond"):
        rendezvous.addresses(Placement(1, 3, f"127.0.0.1:{port}"), 1)


def test_unknown_host_of_rank_0() -> None:
    with pytest.raises(StartError, match=r"no-host\.invalid, is unknown"):
        rendezvous.own_address(Placement(1, 2, "no-host.invalid:1"))
