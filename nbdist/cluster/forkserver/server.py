"""The preloaded parent: imports once, then forks engines that are ready at once.

Run as `python -m nbdist.cluster.forkserver.server DESCRIPTOR FOLDER SECONDS MODULE...`, and on
other hosts by `remote_start.py`. It listens on a socket in the cluster's folder, which it is
handed, for whoever is to give it orders (`control_socket.py`). It imports the modules, runs no op
of theirs and touches no device, then takes orders and tells events, one JSON object a line:

    order                                             event
    {"op": "spawn", "id", "target", "args", "env"}    {"event": "spawned", "id", "pid"}
    {"op": "signal", "id", "signal"}                  {"event": "signalled", "id"}
    {"op": "look"}                                    {"event": "seen", "children"}
    {"op": "tail", "id", "lines"}                     {"event": "tail", "text"}
    {"op": "unlink", "name"}                          {"event": "unlinked"}
    {"op": "preload", "module"}
    {"op": "guard", "pid"}
    {"op": "detach", "on"}
    {"op": "beat"}
    {"op": "farewell", "leaves"}
                                                      {"event": "exited", "id", "pid", "code"}
                                                      {"event": "ready", "versions", "gpus"}
                                                      {"event": "failed", "module", "error"}
                                                      {"event": "ended"}

What `preload` names is imported on a thread, and `spawn` waits for it; the other orders do not.

`target` is "module:function", called in the child with `args` and an `announce` function that
tells the owner an event of the child's own. Each child leads a session of its own.

Being told to end (SIGTERM), one on another host tells its children, and ends with the last. At the
owner's farewell, or when an owner that died has had no successor for `SECONDS`, the fork server
kills every child and every guarded process, and ends. Only the fork server signals its children: as
their parent, it knows that a pid still means the process it started.

Forking is safe as long as the parent has started no framework runtime: a TensorFlow op or a
JAX backend in the parent hangs or crashes the children. Where there is one, children begin from
nothing, and its log says why.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import psutil

from nbdist.cluster.forkserver.child import become, die_with_parent
from nbdist.cluster.forkserver.control_socket import ControlSocket, Event
from nbdist.cluster.forkserver.logs import read_tail
from nbdist.utils.gpus import visible_gpus
from nbdist.utils.processes import await_ends

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel")
IF_THERE = "?"
"""After the name of a module that need not be installed."""

_GUARD_GRACE_S = 3.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Pipe:
    """Writes one event a line; a line under PIPE_BUF is never torn by another writer."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._buffer = b""

    def fileno(self) -> int:
        return self._read

    @property
    def write_end(self) -> int:
        return self._write

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the fork server is gone, and so are we
            os.write(self._write, json.dumps(event).encode() + b"\n")

    def read(self) -> list[Event]:
        *lines, self._buffer = (self._buffer + os.read(self._read, 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]


class ForkServer:
    """The parent's loop.

    Args:
        listener: where owners connect.
        folder: the cluster's.
        grace_s: how long an owner that died may have no successor.
        is_remote: the owner is on another host.
    """

    def __init__(
        self, listener: socket.socket, folder: Path, grace_s: float, *, is_remote: bool = False
    ) -> None:
        self._folder = folder
        self._control_socket = ControlSocket(
            listener, folder, grace_s, self._describe, is_remote=is_remote
        )
        self._of_children = _Pipe()
        self._children: dict[str, int] = {}
        self._versions: dict[str, str] = {}
        self._gpus: tuple[str, ...] = ()
        self._unsafe = ""
        self._is_ready = False
        self._importing: threading.Thread | None = None
        self._is_imported = False
        self._postponed: list[Event] = []
        self._guarded: list[psutil.Process] = []
        self._wake, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._is_told_to_end = False
        if is_remote:
            signal.signal(signal.SIGTERM, self._tell_children)

    def _tell_children(self, _signal: int, _frame: object) -> None:
        """Its host, or whoever gave it, wants it back: engines may save first what they do."""
        self._is_told_to_end = True
        for pid in list(self._children.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _describe(self) -> Event:
        return {
            "children": self._children,
            "versions": self._versions,
            "gpus": self._gpus,
            "cores": sorted(os.sched_getaffinity(0)),
            "ready": self._is_ready,
        }

    def preload(self, modules: list[str]) -> None:
        """Import `modules`; one that fails is reported, and ends the fork server."""
        while not (self._control_socket.is_taken or self._control_socket.over):
            self._wait()  # the first owner is on the way
        for name in modules:
            try:
                self._import(name)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                module = name.removesuffix(IF_THERE)
                self._control_socket.announce({"event": "failed", "module": module, "error": said})
                self._end_everything()
                raise SystemExit(1) from error
        gc.freeze()  # no engine looks through what is imported, or copies the pages it is on
        self._gpus = visible_gpus()
        self._unsafe = _why_not_fork()
        if self._unsafe:
            sys.stderr.write(f"children are not forked, but begin from nothing: {self._unsafe}\n")
        self._is_ready = True
        ready = {"event": "ready", "versions": self._versions, "gpus": self._gpus}
        self._control_socket.announce(ready)

    def _import(self, name: str) -> None:
        wanted = name.removesuffix(IF_THERE)
        if wanted == name or importlib.util.find_spec(wanted) is not None:
            module = importlib.import_module(wanted)
            self._versions[wanted] = getattr(module, "__version__", "")

    def _begin_import(self, name: str) -> None:
        """Import what cells have come to use, on a thread: it takes seconds, and signals do not.

        What is to be forked waits: a child would have the locks of the import, and not its thread.
        """
        self._is_imported = False
        self._importing = threading.Thread(target=self._import_later, args=(name,), daemon=True)
        self._importing.start()

    def _import_later(self, name: str) -> None:
        """The failure of what cells have come to use is theirs."""
        try:
            self._import(name + IF_THERE)
        except Exception:  # noqa: BLE001 - what is forked imports it itself, and says so
            traceback.print_exc()
        self._is_imported = True
        os.write(self._wake_write, b"\0")

    def _end_import(self) -> None:
        """Obey what has waited for the import, if that is done."""
        if self._importing is None or not self._is_imported:
            return
        self._importing.join()
        self._importing = None
        gc.freeze()
        self._unsafe = _why_not_fork()
        postponed, self._postponed = self._postponed, []
        for order in postponed:
            self._obey(order)

    def serve(self) -> None:
        """Obey orders until all is over; then leave nothing running."""
        try:
            while not self._control_socket.over:
                self._wait()
        finally:
            self._end_everything()
            self._control_socket.announce({"event": "ended"})
            if self._control_socket.left:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        """Take in the next thing that happens."""
        waits_on = [*self._control_socket.waits_on(), self._of_children, self._wake]
        readable: list[Any] = select.select(waits_on, [], [], self._control_socket.timeout_s())[0]
        if self._of_children in readable:
            for event in self._of_children.read():
                self._control_socket.announce(event)
        if self._wake in readable:
            os.read(self._wake, 4096)
            self._reap()
            self._end_import()
        for order in self._control_socket.serve(readable):
            self._obey(order)

    def _obey(self, order: Event) -> None:
        if self._importing is not None and order["op"] in ("spawn", "preload"):
            self._postponed.append(order)
        elif order["op"] == "spawn":
            self._spawn(order)
        elif order["op"] == "signal":
            self._signal(order["id"], order["signal"])
        elif order["op"] == "look":
            self._control_socket.announce({"event": "seen", "children": self._look()})
        elif order["op"] == "tail":
            text = read_tail(self._folder, order["id"], order["lines"])
            self._control_socket.announce({"event": "tail", "text": text})
        elif order["op"] == "unlink":
            for path in self._folder.glob(f"{order['name']}:*"):
                path.unlink(missing_ok=True)
            self._control_socket.announce({"event": "unlinked"})
        elif order["op"] == "preload":
            self._begin_import(order["module"])
        elif order["op"] == "guard":
            with contextlib.suppress(psutil.NoSuchProcess):
                self._guarded.append(psutil.Process(order["pid"]))

    def _spawn(self, order: Event) -> None:
        pid = os.fork() if not self._unsafe else self._begin(order)
        if pid == 0:
            self._become_child(order)
        self._children[order["id"]] = pid
        self._control_socket.announce({"event": "spawned", "id": order["id"], "pid": pid})

    def _become_child(self, order: Event) -> NoReturn:
        """What was forked leaves what is the fork server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        die_with_parent()
        self._control_socket.close()
        for descriptor in (self._of_children.fileno(), self._wake, self._wake_write):
            os.close(descriptor)
        become(order, self._folder, self._of_children)

    def _begin(self, order: Event) -> int:
        """A child that imports everything itself; returns its pid."""
        descriptor = self._of_children.write_end
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nbdist.cluster.forkserver.child",
                str(self._folder),
                str(descriptor),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[descriptor],
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(order).encode())
        process.returncode = 0  # it is waited for with the others
        return process.pid

    def _look(self) -> dict[str, tuple[int, bool]]:
        """Of each child that runs, its memory in bytes, and whether it is frozen."""
        return {child: _state_of(pid) for child, pid in self._children.items()}

    def _signal(self, child: str, number: int) -> None:
        if child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._children[child], number)
        self._control_socket.announce({"event": "signalled", "id": child})

    def _reap(self) -> None:
        for name, pid in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[name]
                code = os.waitstatus_to_exitcode(status)
                self._control_socket.announce(
                    {"event": "exited", "id": name, "pid": pid, "code": code}
                )
        if self._is_told_to_end and not self._children:
            self._control_socket.over = self._control_socket.left = True

    def _end_everything(self) -> None:
        self._control_socket.end()
        for pid in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._children.values():
            os.waitpid(pid, 0)
        family = [p for guarded in self._guarded for p in _with_children(guarded)]
        known = {process.pid for process in self._guarded}
        for process in self._guarded:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() not in known:  # the others are ended by these, and sooner so
                    process.terminate()
        for process in await_ends(family, _GUARD_GRACE_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _state_of(pid: int) -> tuple[int, bool]:
    """Memory in bytes, and whether it is frozen; read at once, for there may be hundreds.

    Args:
        pid: of a child that has not been waited for, and so is there, if only as a zombie.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the state on
    return int(fields[21]) * _PAGE_BYTES, fields[0] == "T"


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    """But those in sessions of their own, as what cancels jobs: they go on by themselves."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        session = os.getsid(process.pid)
        below = process.children(recursive=True)
        return [process, *(child for child in below if os.getsid(child.pid) == session)]
    return []


def _why_not_fork() -> str:
    """What has begun to run in this process, and would hang or crash what is forked from it.

    Nothing of what a fork server imports does; what a user has Python import at its start may.
    """
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if str(file.readlink()).startswith(_DEVICES):
                return f"{file.readlink()} is open"
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        return "JAX has a backend"
    eager = sys.modules.get("tensorflow.python.eager.context")
    if eager is not None and getattr(eager.context(), "_context_handle", None) is not None:
        return "TensorFlow has run an op"
    return ""


def main() -> None:
    descriptor, folder, grace_s, *modules = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    fork_server = ForkServer(listener, Path(folder), float(grace_s))
    fork_server.preload(modules)
    fork_server.serve()


if __name__ == "__main__":
    main()
