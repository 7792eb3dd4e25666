"""Start of a fork server on this host for a notebook on another host, over ssh.

Run as `python -m nbdist.cluster.forkserver.remote_start`. It reads a `ForkServerRequest` as JSON
from standard input, which no shell interprets. It prints a `ForkServerLocation` as JSON on the last
line. The fork server outlives the ssh connection: its owner connects to its socket, which ssh
forwards to the notebook's machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nbdist.cluster.forkserver.control_socket import FORK_SERVER_SOCKET, listen
from nbdist.cluster.forkserver.logs import FORK_SERVER_LOG, LOG_FOLDER, log_file
from nbdist.cluster.forkserver.server import ForkServer
from nbdist.records import ForkServerLocation, ForkServerRequest

if TYPE_CHECKING:
    import socket

ROOT = Path("/tmp")  # noqa: S108 - the folder is made here, for this user only
"""Folder with a short path (Linux limits socket paths to 108 bytes) that outlives the login."""


def main() -> None:
    start_request = msgspec.json.decode(sys.stdin.buffer.read(), type=ForkServerRequest)
    folder = ROOT / start_request.name
    folder.mkdir(mode=0o700)
    (folder / LOG_FOLDER).mkdir(mode=0o700)
    work = Path(start_request.work).expanduser()
    if start_request.must_work_there and not work.is_dir():
        shutil.rmtree(folder)
        sys.exit(f"folder {start_request.work} does not exist")
    os.chdir(work if work.is_dir() else Path.home())
    listener = listen(folder / FORK_SERVER_SOCKET)
    client, _, server, _ = (os.environ.get("SSH_CONNECTION") or "   ").split(" ")
    pid = os.fork()
    if pid == 0:
        _become_fork_server(listener, folder, start_request)
    location = ForkServerLocation(pid=pid, folder=str(folder), address=server, from_address=client)
    sys.stdout.write(f"{msgspec.json.encode(location).decode()}\n")


def _become_fork_server(
    listener: socket.socket, folder: Path, start_request: ForkServerRequest
) -> None:
    """Run the fork server, detached from the session and streams of ssh. Never returns."""
    os.setsid()
    log = os.open(log_file(folder, FORK_SERVER_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(start_request.env)
    fork_server = ForkServer(listener, folder, start_request.grace_s, is_remote=True)
    try:
        fork_server.preload(list(start_request.modules))
    except SystemExit:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    fork_server.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
