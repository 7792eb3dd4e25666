"""Connect a scheduler's host to the notebook's machine: `... dial_in FILE [TASK]`.

It connects to where the file (`DialInTicket`) says, and is an SSH server on that connection:
whoever has the one key that it trusts may start a fork server here
(`cluster/forkserver/remote_start.py`), and have the sockets of the cluster's folder brought here
and there; nothing else, and nothing of it listens on a network. A connection that breaks is made
again. It ends once its fork server has, or when nobody has answered for a while.

Being told to end (SIGTERM), it tells the fork server, and that its engines, which save what they
do; it goes on until they have ended, for their words pass through it, and ends as one that was
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
import msgspec

from nbdist.cluster.forkserver.remote_start import ROOT
from nbdist.records import DialedHost, DialInTicket, ForkServerLocation

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECTION: dict[str, Any] = {
    "config": None,
    "encryption_algs": ["aes128-gcm@openssh.com", "aes256-ctr"],
    "compression_algs": None,
    "login_timeout": 10,
    "keepalive_interval": 2,  # seconds without data; after three intervals it is lost
    "keepalive_count_max": 3,
}
"""Options of the SSH connection on both of its sides."""

WHO, START_FORK_SERVER, END = "who", "start_fork_server", "end"
"""What it does when it is asked to."""

PATIENCE_S = 60.0
"""How long it tries to reach the notebook's machine while it has no fork server."""

_AGAIN_S = 0.3
_PR_SET_CHILD_SUBREAPER = 36
_TASKS = (
    "OMPI_COMM_WORLD_RANK",  # before Slurm's own, by which mpiexec may start its helpers
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
_TASKS_FROM_1 = ("PBS_ARRAYID", "PBS_ARRAY_INDEX", "SGE_TASK_ID", "LSB_JOBINDEX")
"""Variables in which launchers say which part of a job a process is."""


class _HostServer(asyncssh.SSHServer):
    """Lets in whoever has the key, to the sockets of one cluster's seeds.

    Args:
        cluster: which.
    """

    def __init__(self, cluster: str) -> None:
        own = f"{ROOT}/nbdist-{cluster}-"
        self._ours = re.compile(rf"{re.escape(own)}[A-Za-z0-9-]+/[A-Za-z0-9.:-]+", re.ASCII)

    def begin_auth(self, username: str) -> bool:
        return True

    def unix_connection_requested(self, dest_path: str) -> bool:
        return bool(self._ours.fullmatch(dest_path))

    def unix_server_requested(self, listen_path: str) -> bool:
        return bool(self._ours.fullmatch(listen_path))


class _Host:
    """This one.

    Args:
        calling: where to connect.
        task: which part of its job this process is.
    """

    def __init__(self, calling: DialInTicket, task: int) -> None:
        self._calling = calling
        self._who = DialedHost(job=calling.job, task=task)
        self._ends: tuple[str, str] = "", ""  # of the connection: that machine, this one
        self._fork_server = 0
        self._is_told_to_end = False
        self._over = asyncio.Event()
        self._until = time.monotonic() + PATIENCE_S

    async def serve(self) -> str:
        """Serve until the fork server ends or nobody answers in time; return the reason."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._notify_fork_server)
        calls = asyncio.ensure_future(self._call())
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait([calls, over], return_when=asyncio.FIRST_COMPLETED)
        calls.cancel()
        over.cancel()
        if calls.done():
            return calls.result()
        return "it was told to end (SIGTERM)" if self._is_told_to_end else ""

    async def _call(self) -> str:
        """Have a connection, again and again; says why there is none any more."""
        said = "nobody answered"
        while self._fork_server or time.monotonic() < self._until:
            try:
                connection = await self._connect()
            except (OSError, asyncssh.Error) as error:
                said = str(error)
                await asyncio.sleep(_AGAIN_S)
                continue
            self._ends = _address(connection, "peername"), _address(connection, "sockname")
            await connection.wait_closed()
            self._until = time.monotonic() + PATIENCE_S
        return f"{self._calling.address}:{self._calling.port} cannot be reached: {said}"

    async def _connect(self) -> asyncssh.SSHServerConnection:
        calling = self._calling
        return await asyncssh.connect_reverse(
            calling.address,
            calling.port,
            server_factory=functools.partial(_HostServer, calling.cluster),
            process_factory=self._obey,
            server_host_keys=[asyncssh.import_private_key(calling.key)],
            authorized_client_keys=asyncssh.import_authorized_keys(calling.trusted),
            encoding=None,
            allow_pty=False,
            agent_forwarding=False,
            **CONNECTION,
        )

    async def _obey(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        if process.command == WHO:
            process.stdout.write(msgspec.json.encode(self._who))
            process.exit(0)
        elif process.command == START_FORK_SERVER:
            await self._start_fork_server(process)
        elif process.command == END:
            process.exit(0)
            self._over.set()
        else:
            process.exit(1)

    async def _start_fork_server(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """Start a fork server, as ssh would. It becomes this process's child."""
        content = await process.stdin.read()
        client, server = self._ends
        starter = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nbdist.cluster.forkserver.remote_start"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SSH_CONNECTION": f"{client} 0 {server} 0"},
        )
        output, said = await starter.communicate(content)
        if starter.returncode == 0:
            self._follow(msgspec.json.decode(output, type=ForkServerLocation).pid)
        process.stdout.write(output)
        process.stderr.write(said)
        process.exit(starter.returncode or 0)

    def _follow(self, pid: int) -> None:
        """Notice the end of the fork server."""
        self._fork_server = pid
        descriptor = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, self._reap, pid, descriptor)

    def _reap(self, pid: int, descriptor: int) -> None:
        """A fork server that was told to end took its leave; one that died may have a successor."""
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        if self._fork_server == pid:
            self._fork_server, self._until = 0, time.monotonic() + PATIENCE_S
            if os.waitstatus_to_exitcode(status) == 0:
                self._over.set()

    def _notify_fork_server(self) -> None:
        self._is_told_to_end = True
        if self._fork_server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._fork_server, signal.SIGTERM)
        else:
            self._over.set()


def _address(connection: asyncssh.SSHServerConnection, end: str) -> str:
    return str(connection.get_extra_info(end)[0])


def task_of(environment: Mapping[str, str]) -> int:
    """Which part of its job a process is, from 0; 0 where no variable of a launcher says."""
    found = [int(environment[n]) for n in _TASKS if environment.get(n, "").isdecimal()]
    found += [int(environment[n]) - 1 for n in _TASKS_FROM_1 if environment.get(n, "").isdecimal()]
    return found[0] if found else 0


def main() -> None:
    file, *typed = sys.argv[1:]
    calling = msgspec.json.decode(Path(file).read_bytes(), type=DialInTicket)
    task = int(typed[0]) if typed else task_of(os.environ)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    async def serve() -> str:
        return await _Host(calling, task).serve()

    sys.exit(asyncio.run(serve()) or 0)


if __name__ == "__main__":
    main()
