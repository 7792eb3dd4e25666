"""Connection of a scheduler's host to the notebook's machine: `... dial_in FILE [TASK]`.

This process runs on the host. It connects to the address in the file (`DialInTicket`), and acts as
an SSH server on that connection. The holder of the one trusted key may start a fork server here
(`cluster/forkserver/remote_start.py`) and forward the sockets of the cluster's folder, but nothing
else. Nothing listens on a network. The process reconnects after a broken connection. It ends after
its fork server, or when it cannot connect for some time.

It passes SIGTERM on to the fork server and so to the engines, which save a checkpoint. It continues
until they have ended, because their messages pass through it. Its exit code then reports a failure.
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
from nbdist.utils import hash_seed

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
"""Commands that the notebook's machine may run here."""

PATIENCE_S = 60.0
"""Time to try to reach the notebook's machine while no fork server runs."""

_AGAIN_S = 0.3
_PR_SET_CHILD_SUBREAPER = 36
_TASKS = (
    "OMPI_COMM_WORLD_RANK",  # before Slurm's variable, which helpers of mpiexec may set
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
_TASKS_FROM_1 = ("PBS_ARRAYID", "PBS_ARRAY_INDEX", "SGE_TASK_ID", "LSB_JOBINDEX")
"""Variables with the index of a process in its job, counted from 1. Those above count from 0."""


class _HostServer(asyncssh.SSHServer):
    """SSH server that forwards only the sockets of one cluster's fork servers.

    Args:
        cluster: the id of the cluster.
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
    """This host, with its connection and its fork server.

    Args:
        ticket: the address to connect to, and the keys.
        task: the index of this process in its job, from 0.
    """

    def __init__(self, ticket: DialInTicket, task: int) -> None:
        self._ticket = ticket
        self._who = DialedHost(job=ticket.job, task=task)
        self._ends: tuple[str, str] = "", ""  # addresses of the connection: remote, local
        self._fork_server = 0
        self._is_terminating = False
        self._over = asyncio.Event()
        self._until = time.monotonic() + PATIENCE_S

    async def serve(self) -> str:
        """Serve until the fork server ends or the connection times out, and return the reason."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._notify_fork_server)
        calls = asyncio.ensure_future(self._call())
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait([calls, over], return_when=asyncio.FIRST_COMPLETED)
        calls.cancel()
        over.cancel()
        if calls.done():
            return calls.result()
        return "received SIGTERM" if self._is_terminating else ""

    async def _call(self) -> str:
        """Connect, reconnect after each break, and return the reason for giving up."""
        errors = "no response"
        while self._fork_server or time.monotonic() < self._until:
            try:
                connection = await self._connect()
            except (OSError, asyncssh.Error) as error:
                errors = str(error)
                await asyncio.sleep(_AGAIN_S)
                continue
            self._ends = _address(connection, "peername"), _address(connection, "sockname")
            await connection.wait_closed()
            self._until = time.monotonic() + PATIENCE_S
        return f"{self._ticket.address}:{self._ticket.port} cannot be reached: {errors}"

    async def _connect(self) -> asyncssh.SSHServerConnection:
        ticket = self._ticket
        return await asyncssh.connect_reverse(
            ticket.address,
            ticket.port,
            server_factory=functools.partial(_HostServer, ticket.cluster),
            process_factory=self._execute,
            server_host_keys=[asyncssh.import_private_key(ticket.key)],
            authorized_client_keys=asyncssh.import_authorized_keys(ticket.trusted),
            encoding=None,
            allow_pty=False,
            agent_forwarding=False,
            **CONNECTION,
        )

    async def _execute(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
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
        """Start a fork server as ssh would. It becomes a child of this process."""
        content = await process.stdin.read()
        client, server = self._ends
        starter = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "nbdist.cluster.forkserver.remote_start"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                hash_seed.VARIABLE: hash_seed.value(),
                "SSH_CONNECTION": f"{client} 0 {server} 0",
            },
        )
        output, errors = await starter.communicate(content)
        if starter.returncode == 0:
            self._follow(msgspec.json.decode(output, type=ForkServerLocation).pid)
        process.stdout.write(output)
        process.stderr.write(errors)
        process.exit(starter.returncode or 0)

    def _follow(self, pid: int) -> None:
        """Watch for the end of the fork server."""
        self._fork_server = pid
        descriptor = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, self._reap, pid, descriptor)

    def _reap(self, pid: int, descriptor: int) -> None:
        """Reap the fork server. End after a normal exit; after a crash, wait for a successor."""
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        if self._fork_server == pid:
            self._fork_server, self._until = 0, time.monotonic() + PATIENCE_S
            if os.waitstatus_to_exitcode(status) == 0:
                self._over.set()

    def _notify_fork_server(self) -> None:
        self._is_terminating = True
        if self._fork_server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._fork_server, signal.SIGTERM)
        else:
            self._over.set()


def _address(connection: asyncssh.SSHServerConnection, end: str) -> str:
    return str(connection.get_extra_info(end)[0])


def task_of(environment: Mapping[str, str]) -> int:
    """Return the index of a process in its job, from 0; 0 if no launcher's variable is set."""
    found = [int(environment[n]) for n in _TASKS if environment.get(n, "").isdecimal()]
    found += [int(environment[n]) - 1 for n in _TASKS_FROM_1 if environment.get(n, "").isdecimal()]
    return found[0] if found else 0


def main() -> None:
    file, *typed = sys.argv[1:]
    ticket = msgspec.json.decode(Path(file).read_bytes(), type=DialInTicket)
    task = int(typed[0]) if typed else task_of(os.environ)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    async def serve() -> str:
        return await _Host(ticket, task).serve()

    sys.exit(asyncio.run(serve()) or 0)


if __name__ == "__main__":
    main()
