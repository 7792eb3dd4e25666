"""Start of a program in several processes on this machine: `nbdist run`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from nbdist.cluster import environment
from nbdist.errors import UsageError
from nbdist.records import ClusterRequest, Host
from nbdist.utils.gpus import visible_gpus
from nbdist.utils.polling import repeat_until
from nbdist.utils.processes import CONTINUES, TERMINATED, cause_of, wait_or_kill
from nbdist.utils.sockets import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

_POLL_S = 0.05
_END_S = 5.0
"""Time that processes have to end after another has failed (seconds)."""

_SAVE_S = 600.0
"""Time that processes have to save a checkpoint after SIGTERM (seconds)."""


def run(program: Path, arguments: Sequence[str], hosts: int) -> int:
    """Run a program once for each host, and wait until all processes have ended.

    If a process fails, nbdist ends the others: they would wait for it. It passes SIGTERM on, and
    waits until the processes have saved a checkpoint. Another signal ends them at once.

    Args:
        program: the Python file.
        arguments: arguments of the program.
        hosts: number of processes.

    Returns:
        The exit status: 0, that of the process that failed first, or 128 plus the number of the
        signal that ended it or this process. 75 if the program can continue from a checkpoint.

    Raises:
        UsageError: the file does not exist, or the number is less than 1.
    """
    if hosts < 1:
        raise UsageError(f"--hosts {hosts}: use a number from 1")
    if not program.is_file():
        raise UsageError(f"{program} is no file: name the program, as in nbdist run train.py")
    request = ClusterRequest(
        hosts=tuple(Host() for _ in range(hosts)), frameworks=("tensorflow", "jax")
    )
    gpus = visible_gpus()
    places = environment.of_places(request, lambda _host: gpus)
    shared = {"PYTHONUNBUFFERED": "1", **environment.shared(request), **os.environ}
    shared |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(_free_port())}
    shared.pop("TF_CONFIG", None)
    command = [sys.executable, str(program), *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    with _signals() as received:
        try:
            for rank, own in enumerate(places):
                env = {**shared, **own, "RANK": str(rank), "WORLD_SIZE": str(hosts)}
                processes.append(_started(command, env, f"[{rank}] " if hosts > 1 else ""))
            return _await(processes, received)
        finally:
            _end(processes)


def _started(command: Sequence[str], env: dict[str, str], prefix: str) -> subprocess.Popen[bytes]:
    """Start a process; the lines that it writes get a prefix."""
    piped = subprocess.PIPE if prefix else None
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=piped, stderr=piped
    )
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if source is not None:
            threading.Thread(target=_copy, args=(source, target, prefix), daemon=True).start()
    return process


def _copy(source: IO[bytes], target: IO[str], prefix: str) -> None:
    """Copy lines until the process closes its end."""
    with source:
        for line in source:
            target.write(prefix + line.decode(errors="replace"))
            target.flush()


def _await(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Wait until all processes have ended, one has failed, or this process received a signal."""
    while not received:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None and codes[failed] in (CONTINUES, TERMINATED):
            return _await_checkpoint(processes, received)
        if failed is not None:
            return _reported(failed, codes[failed] or 0, len(processes))
        if None not in codes:
            return 0
        time.sleep(_POLL_S)
    if received[0] == signal.SIGTERM:
        for process in processes:
            process.terminate()
        return _await_checkpoint(processes, received)
    return 128 + received[0]


def _await_checkpoint(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Wait until processes that stop after SIGTERM have ended, and return the exit status."""
    known = len(received)

    def has_ended() -> bool:
        return len(received) > known or None not in [process.poll() for process in processes]

    repeat_until(has_ended, _SAVE_S, _POLL_S)
    codes = {process.returncode for process in processes}
    return CONTINUES if codes == {CONTINUES} else TERMINATED


def _reported(rank: int, code: int, hosts: int) -> int:
    """Report the process that failed, and return the exit status."""
    others = " nbdist ended the other ranks." if hosts > 1 else ""
    sys.stderr.write(f"nbdist: rank {rank} failed: {cause_of(code)}.{others}\n")
    return 128 - code if code < 0 else code


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _END_S
    for process in processes:
        wait_or_kill(process, max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that the processes end before this one."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
