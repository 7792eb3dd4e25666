"""The preloaded parent: imports once, then forks engines that are ready at once.

Run as `python -m nbdist.cluster.seed MODULE...`. It imports the modules, runs no op of theirs
and touches no device, then reads orders from standard input and writes events to standard
output, one JSON object a line:

    order                                             event
    {"op": "spawn", "id", "target", "args", "env", "log"}   {"event": "spawned", "id", "pid"}
    {"op": "signal", "id", "signal"}                  {"event": "signalled", "id"}
    {"op": "guard", "pid"}
                                                      {"event": "exited", "id", "pid", "code"}
                                                      {"event": "ready", "seconds", "versions"}

`target` is "module:function", called in the child with `args` and an `announce` function that
puts an event of the child's own on the same pipe. Each child leads a session of its own.

When standard input closes, because its owner stopped it or died, the seed kills every child
and every guarded process, and ends. Only the seed signals its children: as their parent, it
knows that a pid still means the process it started.

Forking is safe as long as the parent has started no framework runtime: a TensorFlow op or a
JAX backend in the parent hangs or crashes the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

Event = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_GUARD_GRACE_S = 3.0


class _EventPipe:
    """Writes one event a line; a line under PIPE_BUF is never torn by another writer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone; its EOF ends us
            os.write(self._descriptor, json.dumps(event).encode() + b"\n")


class Seed:
    """The parent's loop."""

    def __init__(self, orders: int, events: int) -> None:
        self._orders = orders
        self._announce = _EventPipe(events)
        self._children: dict[str, int] = {}
        self._guarded: list[psutil.Process] = []
        self._wake, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def preload(self, modules: list[str]) -> None:
        """Import `modules`; one that fails is reported, and ends the seed."""
        started = time.perf_counter()
        versions: dict[str, str] = {}
        for name in modules:
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                self._announce({"event": "failed", "module": name, "error": str(error)})
                raise SystemExit(1) from error
            versions[name] = getattr(module, "__version__", "")
        seconds = time.perf_counter() - started
        self._announce({"event": "ready", "seconds": seconds, "versions": versions})

    def serve(self) -> None:
        """Obey orders until standard input closes; then leave nothing running."""
        buffer = b""
        try:
            while True:
                readable, _, _ = select.select([self._orders, self._wake], [], [])
                if self._wake in readable:
                    os.read(self._wake, 4096)
                    self._reap()
                if self._orders in readable:
                    chunk = os.read(self._orders, 1 << 16)
                    if not chunk:
                        return
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
        finally:
            self._end_everything()

    def _obey(self, order: Event) -> None:
        if order["op"] == "spawn":
            self._spawn(order)
        elif order["op"] == "signal":
            self._signal(order["id"], order["signal"])
        elif order["op"] == "guard":
            with contextlib.suppress(psutil.NoSuchProcess):
                self._guarded.append(psutil.Process(order["pid"]))

    def _spawn(self, order: Event) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_child(order)
        self._children[order["id"]] = pid
        self._announce({"event": "spawned", "id": order["id"], "pid": pid})

    def _become_child(self, order: Event) -> None:
        """Never returns: runs the target in a session of its own."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            _die_with_parent()
            for descriptor in (self._orders, self._wake, self._wake_write):
                os.close(descriptor)
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.environ.update(order["env"])
            module, function = order["target"].split(":")
            getattr(importlib.import_module(module), function)(order["args"], self._announce)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - the boundary of the process: the log shows it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _signal(self, child: str, number: int) -> None:
        if child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._children[child], number)
        self._announce({"event": "signalled", "id": child})

    def _reap(self) -> None:
        for child, pid in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[child]
                code = os.waitstatus_to_exitcode(status)
                self._announce({"event": "exited", "id": child, "pid": pid, "code": code})

    def _end_everything(self) -> None:
        for pid in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._children.values():
            os.waitpid(pid, 0)
        family = [p for guarded in self._guarded for p in _with_children(guarded)]
        for process in self._guarded:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=_GUARD_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the seed is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _private_stdio() -> tuple[int, int]:
    """Keep the pipes to ourselves: what a module prints while imported goes to the log."""
    orders, events = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return orders, events


def main() -> None:
    orders, events = _private_stdio()
    seed = Seed(orders, events)
    seed.preload(sys.argv[1:])
    seed.serve()


if __name__ == "__main__":
    main()
