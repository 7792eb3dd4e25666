"""JAX's coordination service of a program: a process beside rank 0.

JAX ends each process whose service has ended, with a message that names no rank. The service
therefore continues after the death of rank 0, until the other ranks have ended.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import psutil

from nbdist.errors import StartError
from nbdist.utils.polling import repeat_until
from nbdist.utils.processes import wait_or_kill

_OTHERS_S = 15.0
"""Longest time that the other ranks have to end after the death of rank 0 (seconds)."""

_POLL_S = 0.2
_END_S = 10.0
_ENDED = b"."


class Coordinator:
    """Process that runs the service. It starts while rank 0 loads JAX.

    Args:
        host: address to listen on.
        world_size: number of processes.
        port: port to listen on; 0 for a free one.
    """

    def __init__(self, host: str, world_size: int, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, host, str(world_size), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it would keep the output of the program open
            start_new_session=True,  # an interrupt from the terminal reaches the ranks only
        )

    def address(self) -> str:
        """Wait for the service, and return its address, `host:port`.

        Raises:
            StartError: another process uses the port.
        """
        assert self._process.stdout is not None
        with self._process.stdout as answer:
            address, _, error = answer.readline().decode().strip().partition(" ")
        if error or not address:
            self.close()
            raise StartError(f"rank 0 cannot start JAX's coordination service: {error}")
        return address

    def close(self) -> None:
        """End the service. The other ranks have left it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as end:
            end.write(_ENDED)
        wait_or_kill(self._process, _END_S)


def main(host: str, world_size: int, port: int) -> None:
    """Serve until rank 0 ends the service, or until the other ranks have ended after its death."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    from nbdist.private_api.jax import _jax
    from nbdist.worker.jax.runtime import coordinator

    try:
        service, address = coordinator.serve(host, world_size, port)
    except (StartError, _jax.JaxRuntimeError) as error:
        _answer(f"{host}:{port} {error}".partition("\n")[0])
        return
    _answer(address)
    if sys.stdin.buffer.read(1) != _ENDED:
        repeat_until(_has_no_clients, _OTHERS_S, _POLL_S)
    service.shutdown()


def _answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _has_no_clients() -> bool:
    connections = psutil.Process().net_connections("tcp")
    return all(connection.status != psutil.CONN_ESTABLISHED for connection in connections)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
