"""Start of the rendezvous process by its client, with a double of the fork server's client."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.cluster.schedulers.reverse_connection import RendezvousClient
from nbdist.errors import StartError
from nbdist.records import Batch

LISTENS_LATE = """
import socket, time

listen = socket.socket.listen

def late(self, *args):
    if self.family == socket.AF_UNIX:
        time.sleep(1)
    return listen(self, *args)

socket.socket.listen = late
"""
"""Module that Python imports first: a machine that is slow between `bind` and `listen`."""


@pytest.mark.processes
def test_requests_wait_until_the_socket_accepts_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules, folder = tmp_path / "modules", tmp_path / "cluster"
    modules.mkdir()
    (folder / "log").mkdir(parents=True)
    (modules / "sitecustomize.py").write_text(LISTENS_LATE)
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{Path.cwd()}")
    monkeypatch.setenv("PATH", str(modules))
    home: Any = SimpleNamespace(
        folder=folder, state=SimpleNamespace(pid=os.getpid()), guard=lambda _: None
    )
    client = RendezvousClient(Batch(launcher="mpi", listen="127.0.0.1"), home, 10.0)
    try:
        with pytest.raises(StartError, match="mpiexec is not installed here"):
            client.request_hosts([0], lambda _: None)
    finally:
        if client._process is not None:
            client._process.terminate()
        client.close()
