"""Installation of the notebook's environment on other hosts, over their ssh connections."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.cluster.remote_host import environment_lock
from nbdist.cluster.remote_host.host_dialogue import HostDialogue, command_of
from nbdist.cluster.remote_host.host_program import REMEDY
from nbdist.errors import StartError, UsageError
from nbdist.records import EnvironmentLock
from nbdist.utils import wheels
from nbdist.utils.files import replace_file
from nbdist.utils.processes import wait_or_kill
from nbdist.views import formatting

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Collection, Iterator, Mapping

    from nbdist.records import Host, LockedPackage

_FILE = "environment.msgpack"
_END_S = 2.0
_MARGIN = 1.05
"""Disk space to require, by the size of the files."""

_SHOWN = 300
"""Characters of uv's output that an error contains."""


class HostEnvironments:
    """Environments on the hosts of one cluster, all from one lock.

    The lock is stored in the cluster's folder, so that hosts that are replaced later get the same
    packages.

    Args:
        folder: the cluster's folder.
        packed: folder of packed wheels.
    """

    def __init__(self, folder: Path, packed: Path) -> None:
        self._path = folder / _FILE
        self._packed = packed
        self._packing = threading.Lock()
        self._progress: dict[str, str] = {}
        self._outcomes: dict[str, str] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._cancelled = threading.Event()

    @functools.cached_property
    def _lock(self) -> EnvironmentLock:
        with contextlib.suppress(OSError):
            return msgspec.msgpack.decode(self._path.read_bytes(), type=EnvironmentLock)
        lock = environment_lock.lock(self._packed)
        replace_file(self._path, msgspec.msgpack.encode(lock), 0o600)
        return lock

    def prepare(self, show_message: Callable[[str], None]) -> None:
        """Lock the notebook's packages at the first start, and show their size.

        Raises:
            UsageError: a package cannot be sent.
        """
        self._cancelled.clear()
        show_message("reads the notebook's packages")
        show_message(self._described())

    def progress(self) -> str:
        """Return the progress of all hosts; empty if none installs."""
        return "; ".join(f"{key} {text}" for key, text in sorted(self._progress.copy().items()))

    def outcome(self) -> str:
        """Describe the environment, and how each host got it."""
        each = ", ".join(f"{key} {text}" for key, text in sorted(self._outcomes.items()))
        return f"{self._described()}: {each}"

    def cancel(self) -> None:
        """End all installations. Hosts remove incomplete environments."""
        self._cancelled.set()
        for process in self._processes.copy():
            process.kill()

    def _described(self) -> str:
        count, size = len(self._lock.packages), formatting.size(self._lock.size_bytes)
        without = f", without {', '.join(self._lock.left_out)}" if self._lock.left_out else ""
        return f"environment of {count} packages, {size}{without}"

    def python_on(self, host: Host, start: Callable[[str, Any], subprocess.Popen[bytes]]) -> str:
        """Return the path of the Python of the environment on a host. Install it if necessary.

        Args:
            host: the host. Its `python` is the one that the environment is based on.
            start: starts a command of the host's shell, with pipes and a file for errors.

        Raises:
            StartError: the environment cannot be installed. The message contains the remedy.
        """
        base = f"{sys.base_prefix}/bin/python{self._lock.minor}"
        candidates = (
            [host.python] if host.python else [base, f"python{self._lock.minor}", "python3"]
        )
        try:
            with tempfile.TemporaryFile() as log:
                process = start(command_of(candidates, self._lock.minor), log)
                with self._running(process):
                    show = functools.partial(self._show, host.key)
                    there = HostDialogue(host.key, process, log, show)
                    return self._installed(host, there)
        except UsageError as error:
            raise StartError(str(error)) from None
        finally:
            self._progress.pop(host.key, None)

    def _show(self, key: str, text: str) -> None:
        if self._cancelled.is_set():
            raise StartError("the installation was interrupted")
        self._progress[key] = text

    @contextlib.contextmanager
    def _running(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        self._processes.add(process)
        try:
            yield
        finally:
            self._processes.discard(process)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            wait_or_kill(process, _END_S)

    def _installed(self, host: Host, there: HostDialogue) -> str:
        state = there.ask(env=host.env, digest=self._lock.digest)
        if "python" in state:
            self._outcomes[host.key] = "reuses it"
            return str(state["python"])
        uv, fault = state["uv"] or self._send_uv(there, state), self._lock.fault
        if self._lock.requirements:
            local = [package for package in self._lock.packages if package.wheel]
            python, fault = self._build(there, state, uv, local)
            if python:
                return python
        if state["platform"] != self._lock.platform:
            raise StartError(
                f"its platform is {state['platform']}, so it needs the wheels of the index, and "
                f"uv cannot install them there: {_brief(fault)}: give it access to the index, or "
                "use --python PATH with an environment of your own, without --install"
            )
        python, fault = self._build(there, state, uv, self._lock.packages, fault)
        if not python:
            raise StartError(f"uv cannot install the notebook's packages there: {_brief(fault)}")
        return python

    def _build(
        self,
        there: HostDialogue,
        state: Mapping[str, Any],
        uv: str,
        packages: Collection[LockedPackage],
        index_fault: str = "",
    ) -> tuple[str, str]:
        """Send wheels of these packages, and build the environment.

        Args:
            there: the dialogue.
            state: the state of the host.
            uv: uv on the host.
            packages: the packages to send. The host installs the others from the index.
            index_fault: the reason why the host cannot use the index; empty to use it.

        Returns:
            The path of its Python, and the reason of a failure; one of them is empty.
        """
        offline = bool(index_fault)
        there.show(f"waits for wheels of {formatting.count(len(packages), 'package')}")
        with self._packing:  # hosts share the wheels
            files = environment_lock.wheels_of(packages, self._packed, there.show)
        missing = there.missing(files)
        bytes_to_send = sum(files[name].path.stat().st_size - n for name, n in missing.items())
        _require_space(state, self._lock.size_bytes + bytes_to_send)
        there.send(files, missing)
        pins = [f"{one.pin} --hash=sha256:{files[one.name].sha256}" for one in packages]
        answer = there.ask(
            op="build",
            offline=offline,
            uv=uv,
            env=self._lock.index,
            wheels={wheel.path.name: wheel.sha256 for wheel in files.values()},
            requirements="\n".join(pins if offline else [*pins, self._lock.requirements]),
            probe=_first(self._lock.requirements),
        )
        if "python" in answer:
            origin = f"{formatting.size(bytes_to_send)} of wheels" if offline else "the index"
            why = f" (index: {_brief(index_fault)})" if offline else ""
            self._outcomes[there.key] = f"installed it from {origin}{why}"
        return answer.get("python", ""), answer.get("fault", "")

    def _send_uv(self, there: HostDialogue, state: Mapping[str, Any]) -> str:
        """Send the notebook's uv, and return its name on the host."""
        if state["platform"] != self._lock.platform:
            raise StartError(
                f"uv is not installed there, and the notebook's runs on {self._lock.platform}, not "
                f"on {state['platform']}: install uv there"
            )
        path = Path(environment_lock.find_uv())
        files = {"uv": wheels.Wheel(path, wheels.sha256_of(path))}
        there.send(files, there.missing(files))
        return files["uv"].sha256


def _require_space(state: Mapping[str, Any], needed_bytes: float) -> None:
    if needed_bytes * _MARGIN > state["free_bytes"]:
        needed, free = formatting.size(needed_bytes * _MARGIN), formatting.size(state["free_bytes"])
        raise StartError(
            f"the environment needs {needed} in {state['folder']}, and {free} are free: {REMEDY}"
        )


def _first(requirements: str) -> str:
    """Return the first requirement with its hashes."""
    lines = requirements.splitlines()
    end = next((n for n, line in enumerate(lines, 1) if not line.endswith("\\")), 0)
    return "\n".join(lines[:end])


def _brief(fault: str) -> str:
    """Return the start of an error of uv as one line."""
    text = " ".join(fault[max(fault.find("error:"), 0) :].split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
