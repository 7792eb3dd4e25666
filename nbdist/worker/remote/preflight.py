"""Checks of a rank before a run: its host, and its connections to the other ranks.

The checks use no framework: TensorFlow waits for over a minute for a missing peer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import glob
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.records import Gpu, HostFacts, Reach
from nbdist.utils import host_topology
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = (
    "nbdist",
    "ipyparallel",
    "tensorflow",
    "keras",
    "jax",
    "jaxlib",
    "libtpu",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_QUERY = "name,memory.total,memory.used,utilization.gpu,driver_version"
_SMI_S = 3.0
_CONNECT_S = 2.0
_IDLE_S = 10.0
_PINGS = 10
_PIECE = bytes(1 << 16)
_SEND_S = 0.3
_AT_ONCE = 64
_PING, _SEND = b"p", b"s"
_SHM = Path("/dev/shm")  # noqa: S108 - only its free space is read
_MIB = 1 << 20
_listeners: list[socket.socket] = []


def facts() -> HostFacts:
    """Return the facts about this host."""
    gpus, driver = _gpus()
    folder = Path.cwd()
    return HostFacts(
        rank=context.current().rank,
        host=socket.gethostname(),
        python=sys.executable,
        versions=_versions(),
        folder=str(folder),
        cpus=len(os.sched_getaffinity(0)),
        free_bytes=psutil.virtual_memory().available,
        disk_bytes=shutil.disk_usage(folder).free,
        shm_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0,
        gpus=gpus,
        driver=driver,
        time_s=time.time(),
        choices=host_topology.choices(),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs and the version of their driver; empty if the driver does not respond."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_S, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return (), ""
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    gpus = tuple(
        Gpu(
            name=name,
            memory_bytes=int(_number(total) * _MIB),
            used_bytes=int(_number(used) * _MIB),
            busy=_number(busy) / 100,
        )
        for name, total, used, busy, _ in rows
    )
    return gpus, rows[0][4] if rows else ""


def _number(word: str) -> float:
    """Convert a number of nvidia-smi; 0 if the GPU does not report it (`[N/A]`)."""
    try:
        return float(word)
    except ValueError:
        return 0.0


def open_ports(addresses: list[str], token: str, seconds: float) -> int | str:
    """Listen for the other ranks, on the address of a framework's port.

    Args:
        addresses: address of each rank for the other ranks.
        token: secret; connections that do not begin with it are closed.
        seconds: time after which the port closes in any case.

    Returns:
        The port, or the reason why there is none.
    """
    address = addresses[context.current().rank]
    try:
        family, _, _, _, end = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return f"{address} cannot be resolved on this host: {error.strerror or error}"
    try:
        listener.bind(end)
        listener.listen(_AT_ONCE)
    except OSError as error:
        listener.close()
        return f"{address} is not an address of this host: {error.strerror or error}"
    _listeners.append(listener)
    serve = functools.partial(_serve, listener, token.encode(), time.monotonic() + seconds)
    threading.Thread(target=serve, name="nbdist-preflight", daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def close_ports() -> None:
    """Stop listening."""
    while _listeners:
        with contextlib.suppress(OSError):  # the listener has timed out
            _listeners.pop().shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, token: bytes, deadline: float) -> None:
    with listener:
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                link = listener.accept()[0]
            except OSError:  # the listener was closed
                return
            answer = functools.partial(_answer, link, token)
            threading.Thread(target=answer, name="nbdist-preflight", daemon=True).start()


def _answer(link: socket.socket, token: bytes) -> None:
    """Reply to each ping at once, and to each bulk transfer at its end."""
    with link, contextlib.suppress(OSError):
        link.settimeout(_IDLE_S)
        if _read(link, len(token)) != token:
            return
        link.sendall(token)
        while kind := link.recv(1):
            if kind == _PING:
                link.sendall(kind)
            else:
                size = int.from_bytes(_read(link, 8))
                while size > 0 and (part := link.recv(min(size, len(_PIECE)))):
                    size -= len(part)
                if size == 0:
                    link.sendall(kind)


def _read(link: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := link.recv(size - len(found))):
        found += part
    return found


def reach(ends: dict[int, tuple[str, int]], token: str) -> tuple[Reach, ...]:
    """Connect to the other ranks, and measure the latency.

    Args:
        ends: address and port of each rank, this one included.
        token: secret, see `open_ports`.
    """
    own = context.current().rank
    others = [rank for rank in sorted(ends) if rank != own]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "nbdist-preflight") as pool:
        return tuple(pool.map(lambda rank: _reach(rank, ends[rank], token.encode()), others))


def bandwidth(receivers: dict[int, int], ends: dict[int, tuple[str, int]], token: str) -> float:
    """Send to one other rank, and return bytes per second; 0 if the connection fails.

    Args:
        receivers: the rank to which each rank sends. Ranks that are left out send nothing.
        ends: address and port of each rank.
        token: secret, see `open_ports`.
    """
    receiver = receivers.get(context.current().rank)
    if receiver is None:
        return 0.0
    try:
        return _speed(ends[receiver], token.encode())
    except OSError:
        return 0.0


def _reach(rank: int, end: tuple[str, int], token: bytes) -> Reach:
    try:
        with _connected(end, token) as link:
            times = [_ping(link) for _ in range(_PINGS)]
    except OSError as error:
        return Reach(rank, fault=error.strerror or str(error) or type(error).__name__)
    return Reach(rank, latency_s=min(times))


@contextlib.contextmanager
def _connected(end: tuple[str, int], token: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(end, _CONNECT_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(token)
        if _read(link, len(token)) != token:
            raise OSError("another process answers on this port")
        yield link


def _ping(link: socket.socket) -> float:
    began = time.perf_counter()
    link.sendall(_PING)
    _read(link, 1)
    return time.perf_counter() - began


def _speed(end: tuple[str, int], token: bytes) -> float:
    """Return bytes per second. The size doubles until the transfer takes long enough."""
    pieces = 4
    with _connected(end, token) as link:
        link.settimeout(_CONNECT_S)
        while True:
            size = pieces * len(_PIECE)
            began = time.perf_counter()
            link.sendall(_SEND + size.to_bytes(8))
            for _ in range(pieces):
                link.sendall(_PIECE)
            with contextlib.suppress(TimeoutError):  # the time so far gives a bound for a slow link
                _read(link, 1)
            seconds = time.perf_counter() - began
            if seconds > _SEND_S / 3 or pieces >= 1 << 14:
                return size / seconds
            pieces *= 2


def leave_mark(folder: str, name: str) -> str:
    """Write a file for other hosts to look for; return the reason if that fails."""
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def sees_mark(folder: str, name: str) -> bool:
    """Return True if the file is visible here; wait a short time for slow file systems."""
    path = Path(folder).expanduser()
    deadline = time.monotonic() + _CONNECT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            list(path.iterdir())  # makes NFS refresh its cache
            if (path / name).read_text() == name:
                return True
        time.sleep(0.05)
    return False


def remove_mark(folder: str, name: str) -> None:
    with contextlib.suppress(OSError):
        (Path(folder).expanduser() / name).unlink()


def files(pattern: str) -> tuple[int, int, tuple[str, ...]]:
    """Return the number and total bytes of a pattern's files here, and the unreadable files."""
    whole = Path(pattern).expanduser().absolute()
    there = map(Path, glob.glob(str(whole), recursive=True))  # noqa: PTH207 - supports **
    found = [path for path in there if path.is_file()]
    unread = tuple(str(path) for path in found if not os.access(path, os.R_OK))
    return len(found), sum(path.stat().st_size for path in found), unread
