"""Fork server: imports the frameworks once, then forks engines that start immediately.

Run as `python -m nbdist.cluster.forkserver.server DESCRIPTOR FOLDER SECONDS MODULE...`. On other
hosts, `remote_start.py` runs it. It inherits the socket (`DESCRIPTOR`) on which it listens for its
owner (`control_socket.py`). It imports the modules without executing ops or touching devices. Then
it receives commands and sends events, one JSON object in a line:

    command                                           event
    {"op": "spawn", "id", "target", "args", "env"}    {"event": "spawned", "id", "pid"}
    {"op": "signal", "id", "signal"}                  {"event": "signalled", "id"}
    {"op": "list_children"}                           {"event": "children", "children"}
    {"op": "tail", "id", "lines"}                     {"event": "tail", "text"}
    {"op": "unlink", "name"}                          {"event": "unlinked"}
    {"op": "preload", "module"}
    {"op": "guard", "pid"}
    {"op": "detach", "on"}
    {"op": "heartbeat"}
    {"op": "disconnect", "leaves"}
                                                      {"event": "exited", "id", "pid", "code"}
                                                      {"event": "ready", "versions", "gpus"}
                                                      {"event": "failed", "module", "error"}
                                                      {"event": "ended"}

`preload` imports the module on a thread. `spawn` and another `preload` wait for it, other commands
do not.

`target` is "module:function". The child calls it with `args` and a function `announce`, which sends
the owner an event. Each child leads its own session.

A fork server on another host passes SIGTERM on to its children, and ends after the last of them.
When the owner sends `disconnect`, or `SECONDS` after it died without a successor, the fork server
kills every child and every guarded process, and ends. Only the fork server signals its children: as
their parent, it knows that a pid still belongs to the process that it started.

Forking is safe only if the parent has started no framework runtime. A TensorFlow op or a JAX
backend in the parent hangs or crashes the children. In that case the fork server starts each child
as a new Python, and its log contains the reason.
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
from nbdist.errors import LibraryVersionError
from nbdist.private_api import jax as private_jax
from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.utils.allocator import keep_freed_memory
from nbdist.utils.gpus import visible_gpus
from nbdist.utils.processes import await_ends

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel")
IF_THERE = "?"
"""Suffix of the name of a module that is imported only if it is installed."""

_GUARD_GRACE_S = 3.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Pipe:
    """Pipe for events, one in a line. Writes of up to PIPE_BUF bytes are atomic."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._buffer = b""

    def fileno(self) -> int:
        return self._read

    @property
    def write_end(self) -> int:
        return self._write

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the fork server is gone, and its children end
            os.write(self._write, json.dumps(event).encode() + b"\n")

    def read(self) -> list[Event]:
        *lines, self._buffer = (self._buffer + os.read(self._read, 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]


class ForkServer:
    """Event loop of the fork server.

    Args:
        listener: the socket to which owners connect.
        folder: the cluster's folder.
        grace_s: the seconds to wait for a successor after an owner has died.
        is_remote: True if the owner is on another host.
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
        self._is_terminating = False
        if is_remote:
            signal.signal(signal.SIGTERM, self._terminate_children)

    def _terminate_children(self, _signal: int, _frame: object) -> None:
        """Pass SIGTERM on, as after a preemption. The engines save a checkpoint before they end."""
        self._is_terminating = True
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
        """Import modules. If one fails, report it to the owner and exit."""
        while not (self._control_socket.is_owned or self._control_socket.over):
            self._wait()  # the first owner is about to connect
        self._gpus = visible_gpus()
        if not self._gpus:
            keep_freed_memory()  # before the imports start threads
        for name in modules:
            try:
                self._import(name)
            except LibraryVersionError as error:
                sys.stderr.write(f"{name} is not preloaded: {error}\n")  # engines raise it
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                module = name.removesuffix(IF_THERE)
                self._control_socket.announce(
                    {"event": "failed", "module": module, "error": message}
                )
                self._end_everything()
                raise SystemExit(1) from error
        gc.freeze()  # the engines' garbage collection neither traverses nor copies these pages
        self._unsafe = _why_not_fork()
        if self._unsafe:
            sys.stderr.write(f"children start as new processes, without a fork: {self._unsafe}\n")
        self._is_ready = True
        ready = {"event": "ready", "versions": self._versions, "gpus": self._gpus}
        self._control_socket.announce(ready)

    def _import(self, name: str) -> None:
        wanted = name.removesuffix(IF_THERE)
        if wanted == name or importlib.util.find_spec(wanted) is not None:
            gc.disable()  # nearly all objects remain; TensorFlow takes a quarter less time
            try:
                module = importlib.import_module(wanted)
            finally:
                gc.enable()
            self._versions[wanted] = getattr(module, "__version__", "")

    def _begin_import(self, name: str) -> None:
        """Import a module on a thread, because it takes seconds and signals must not wait.

        Forks wait for it: a child would inherit the import locks, but not the thread that holds
        them.
        """
        self._is_imported = False
        self._importing = threading.Thread(target=self._import_later, args=(name,), daemon=True)
        self._importing.start()

    def _import_later(self, name: str) -> None:
        """Import a module if it is installed, and ignore its failure."""
        try:
            self._import(name + IF_THERE)
        except Exception:  # noqa: BLE001 - engines import it themselves and report the error
            traceback.print_exc()
        self._is_imported = True
        os.write(self._wake_write, b"\0")

    def _end_import(self) -> None:
        """Execute the commands that waited for the import, if it is done."""
        if self._importing is None or not self._is_imported:
            return
        self._importing.join()
        self._importing = None
        gc.freeze()
        self._unsafe = _why_not_fork()
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._execute(command)

    def serve(self) -> None:
        """Execute commands until the end, then end all children and guarded processes."""
        try:
            while not self._control_socket.over:
                self._wait()
        finally:
            self._end_everything()
            self._control_socket.announce({"event": "ended"})
            if self._control_socket.left:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        """Wait for the next events and commands, and process them."""
        waits_on = [*self._control_socket.waits_on(), self._of_children, self._wake]
        readable: list[Any] = select.select(waits_on, [], [], self._control_socket.timeout_s())[0]
        if self._of_children in readable:
            for event in self._of_children.read():
                self._control_socket.announce(event)
        if self._wake in readable:
            os.read(self._wake, 4096)
            self._reap()
            self._end_import()
        for command in self._control_socket.serve(readable):
            self._execute(command)

    def _execute(self, command: Event) -> None:
        if self._importing is not None and command["op"] in ("spawn", "preload"):
            self._postponed.append(command)
        elif command["op"] == "spawn":
            self._spawn(command)
        elif command["op"] == "signal":
            self._signal(command["id"], command["signal"])
        elif command["op"] == "list_children":
            children = {child: _state_of(pid) for child, pid in self._children.items()}
            self._control_socket.announce({"event": "children", "children": children})
        elif command["op"] == "tail":
            text = read_tail(self._folder, command["id"], command["lines"])
            self._control_socket.announce({"event": "tail", "text": text})
        elif command["op"] == "unlink":
            for path in self._folder.glob(f"{command['name']}:*"):
                path.unlink(missing_ok=True)
            self._control_socket.announce({"event": "unlinked"})
        elif command["op"] == "preload":
            self._begin_import(command["module"])
        elif command["op"] == "guard":
            with contextlib.suppress(psutil.NoSuchProcess):
                self._guarded.append(psutil.Process(command["pid"]))

    def _spawn(self, command: Event) -> None:
        pid = os.fork() if not self._unsafe else self._begin(command)
        if pid == 0:
            self._become_child(command)
        self._children[command["id"]] = pid
        self._control_socket.announce({"event": "spawned", "id": command["id"], "pid": pid})

    def _become_child(self, command: Event) -> NoReturn:
        """Release the fork server's handlers and descriptors in a forked child, then run it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        die_with_parent()
        self._control_socket.close()
        for descriptor in (self._of_children.fileno(), self._wake, self._wake_write):
            os.close(descriptor)
        become(command, self._folder, self._of_children)

    def _begin(self, command: Event) -> int:
        """Start a child as a new Python that imports everything itself, and return its pid."""
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
            process.stdin.write(json.dumps(command).encode())
        process.returncode = 0  # `_reap` waits for it, as for forked children
        return process.pid

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
        if self._is_terminating and not self._children:
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
                if process.ppid() not in known:  # a guarded parent ends its children itself, faster
                    process.terminate()
        for process in await_ends(family, _GUARD_GRACE_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _state_of(pid: int) -> tuple[int, bool]:
    """Return the memory of a child in bytes, and whether a signal has stopped it.

    This reads one file, because there may be hundreds of children.

    Args:
        pid: the pid of a child that has not been reaped, so that its entry in `/proc` exists.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # field 3 and later
    return int(fields[21]) * _PAGE_BYTES, fields[0] == "T"


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants in the same session.

    Descendants in other sessions, such as the process that cancels jobs, must continue.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        session = os.getsid(process.pid)
        below = process.children(recursive=True)
        return [process, *(child for child in below if os.getsid(child.pid) == session)]
    return []


def _why_not_fork() -> str:
    """Return the reason why forked children would hang or crash; empty if forking is safe.

    The modules that a fork server imports are safe. Modules that the user's Python imports at
    startup may not be.
    """
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            if str(file.readlink()).startswith(_DEVICES):
                return f"{file.readlink()} is open"
    bridge = private_jax.LIBRARY.loaded("xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        return "JAX has a backend"
    eager = private_tensorflow.LIBRARY.loaded("context")
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
