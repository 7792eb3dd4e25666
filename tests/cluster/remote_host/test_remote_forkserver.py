"""Fork server on another host: commands after the host is lost."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from nbdist.cluster.forkserver.control_socket import KERNEL, Peer
from nbdist.cluster.remote_host import remote_forkserver
from nbdist.cluster.remote_host.host_link import HostLink
from nbdist.cluster.remote_host.remote_forkserver import RemoteForkServer
from nbdist.errors import StartError
from nbdist.records import ForkServerLocation, Host

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.cluster.forkserver.client import ForkServerProcess
    from nbdist.cluster.remote_host.host_connection import HostConnection

OWNED: dict[str, Any] = {
    "event": "owned",
    "pid": 9,
    "children": {},
    "versions": {},
    "gpus": [],
    "cores": [],
    "ready": True,
}


class LostConnection:
    """Double of a connection to a host that cannot be reached again."""

    host = Host(name="gpu1", user="me")
    name = "h0"

    def is_open(self) -> bool:
        return False

    def open(self) -> int:
        raise StartError("timed out")

    def why_lost(self) -> str:
        return ""

    def close(self) -> None:
        """Do nothing."""


def test_a_command_to_a_lost_host_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = socket.socketpair()
    there.sendall(json.dumps(OWNED).encode() + b"\n")
    monkeypatch.setattr(HostLink, "reach", lambda _: Peer(here))
    monkeypatch.setattr(remote_forkserver, "LOST_S", 0.05)
    monkeypatch.setattr(remote_forkserver, "_AGAIN_S", 0.01)
    link = cast("HostConnection", LostConnection())
    home = SimpleNamespace(role=KERNEL, folder=tmp_path, guard=lambda _: None)
    location = ForkServerLocation(pid=9, folder=str(tmp_path), address="", from_address="")
    server = RemoteForkServer(link, location, cast("ForkServerProcess", home))
    try:
        there.close()
        server.state.wait_end(60.0)
        with pytest.raises(StartError) as refused:
            server.preload("jax")
    finally:
        server.leave()
    assert str(refused.value) == (
        "me@gpu1 cannot be reached: check the host and the network, then run %dist_restart"
    )
