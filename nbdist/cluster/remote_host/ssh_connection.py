"""Connection to a host through the user's `ssh`.

Each host has one ssh master (`ssh -M -N`), which carries all programs and forwards. Ports of this
machine are forwarded to Unix sockets in a folder of the host that only its user can open. Nothing
listens on a network. The command line contains only checked names (`inventory.py`) and paths chosen
by nbdist. All other data goes through standard input, which no shell interprets.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from nbdist.errors import StartError
from nbdist.utils import hash_seed
from nbdist.utils.processes import wait_or_kill

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.cluster.remote_host.environment_install import HostEnvironments
    from nbdist.records import Host

CONNECT_S = 10.0
"""Time for a host to respond."""

ALIVE_S, ALIVE_TIMES = 2, 5
"""Interval of keepalive messages in seconds, and the number of missing responses to disconnect."""

_END_S = 2.0
_START_FORK_SERVER_S = 30.0
_POLL_S = 0.02
_OPTIONS = {
    "BatchMode": "yes",  # nobody can enter a password
    "ConnectTimeout": str(int(CONNECT_S)),
    "ServerAliveInterval": str(ALIVE_S),
    "ServerAliveCountMax": str(ALIVE_TIMES),
    "StreamLocalBindUnlink": "yes",
    "ClearAllForwardings": "yes",  # ignore forwards of the user's configuration
    "ForwardX11": "no",
    "ForwardAgent": "no",
    "RequestTTY": "no",
    "ControlPersist": "no",  # else ssh moves the master to another process
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
}
_ALONE = ("-F", "none", "-o", "BatchMode=yes", "-o", "ProxyCommand=false")
"""Words of a client that uses the existing master, and never opens a connection of its own."""


class SshConnection:
    """Connection to one host, with its forwards.

    Args:
        host: the host.
        folder: the local folder for sockets. Paths of sockets are relative to it.
        name: the name of the connection, unique in the folder.
        config: the path of an ssh configuration; empty for the user's default.
        environments: environments to install before a fork server starts; None for none.

    Attributes:
        host: the host.
        name: the name of the connection.
    """

    def __init__(
        self,
        host: Host,
        folder: Path,
        name: str,
        config: str = "",
        environments: HostEnvironments | None = None,
    ) -> None:
        self.host = host
        self.name = name
        self._folder = folder
        self._control = f"{name}.ctl"
        self._log = folder / "log" / f"{name}.log"
        self._config = ["-F", str(Path(config).expanduser().absolute())] if config else []
        self._environments = environments
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> int:
        """Connect, and return the pid of the ssh master.

        Raises:
            StartError: the host cannot be reached. The message contains ssh's reason.
        """
        options = [word for pair in _OPTIONS.items() for word in ("-o", "=".join(pair))]
        with self._log.open("wb") as log:
            self._process = process = subprocess.Popen(
                self._command("-M", "-N", *options),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + CONNECT_S + 1
        while not (self._folder / self._control).exists():
            if process.poll() is not None:
                raise StartError(self._last_log_line())
            if time.monotonic() > deadline:
                self.close()
                raise StartError(
                    f"ssh did not connect within {CONNECT_S:g} s: check `{self._login()}` in a "
                    "terminal"
                )
            time.sleep(_POLL_S)
        return process.pid

    def is_open(self) -> bool:
        """Return True if an ssh master responds. Another process may have started it."""
        return (self._folder / self._control).exists() and self._do("-O", "check").returncode == 0

    def start_fork_server(self, content: bytes) -> bytes:
        """Start a fork server on the host, after the installation of its environment.

        Args:
            content: the `ForkServerRequest` as JSON.

        Returns:
            The output of the start. Its last line is a `ForkServerLocation` as JSON.

        Raises:
            StartError: the start failed or took too long. The message contains a remedy.
        """
        python = self.host.python or sys.executable  # checked: no special characters of a shell
        clean = ""
        if self._environments is not None:
            python = shlex.quote(self._environments.python_on(self.host, self._start))
            clean = "-u PYTHONPATH -u PYTHONHOME "
        seed = f"{hash_seed.VARIABLE}={hash_seed.value()}"
        command = [f"exec env {clean}{seed} {python} -m nbdist.cluster.forkserver.remote_start"]
        return self._output(content, command, python)

    def run_python(self, program: bytes) -> bytes:
        """Run a program by the host's Python, and return its output.

        Raises:
            StartError: the program failed or took too long. The message contains a remedy.
        """
        python = self.host.python or sys.executable  # checked: no special characters of a shell
        return self._output(program, [f"exec {python} -"], python)

    def _output(self, content: bytes, command: Sequence[str], python: str) -> bytes:
        """Return the output of a command of the host's Python. Raise StartError if it fails."""
        done = self._do(content=content, command=command, timeout_s=_START_FORK_SERVER_S)
        if done.returncode:
            output = done.stderr.decode(errors="replace").strip() or str(done.returncode)
            raise StartError(_advice(output, python))
        return done.stdout

    def why_lost(self) -> str:
        """Return the reason why the host is lost. It is unknown for ssh, and so empty."""
        return ""

    def forward_local(self, there: str, here: str) -> None:
        """Forward a socket of the host to the path `here` in the local folder.

        Raises:
            StartError: ssh refuses the forward.
        """
        self._forward("-L", f"./{_escaped(here)}:{_escaped(there)}")

    def forward_remote(self, ports: Iterable[int], prefix: str) -> None:
        """Forward loopback ports of this machine to sockets `<prefix>:<port>` on the host.

        Raises:
            StartError: ssh or the host's sshd refuses the forward.
        """
        ends = (f"{_escaped(f'{prefix}:{port}')}:127.0.0.1:{port}" for port in ports)
        self._forward(*(word for end in ends for word in ("-R", end)))

    def _forward(self, *words: str) -> None:
        done = self._do("-O", "forward", *words)
        if done.returncode:
            output = done.stderr.decode(errors="replace").strip()
            raise StartError(
                f"its sshd forwards no sockets ({output}): "
                "set AllowTcpForwarding and AllowStreamLocalForwarding to `yes` there"
            )

    def close(self) -> None:
        """End the connection with all programs and forwards, even if another process opened it."""
        with contextlib.suppress(StartError):
            self._do("-O", "exit", timeout_s=_END_S)
        if self._process is not None:
            wait_or_kill(self._process, _END_S)

    def _command(self, *words: str) -> list[str]:
        config = [] if "-F" in words else self._config
        login = *self._user_and_port(), *words, "--", self.host.name
        return ["ssh", *config, "-S", self._control, *login]

    def _login(self) -> str:
        """Return the command that a user types to log in on the host."""
        return shlex.join(["ssh", *self._config, *self._user_and_port(), self.host.name])

    def _user_and_port(self) -> list[str]:
        user = ["-l", self.host.user] if self.host.user else []
        return user + (["-p", str(self.host.port)] if self.host.port else [])

    def _start(self, command: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command of the host's shell over the existing master, with pipes."""
        return subprocess.Popen(
            [*self._command(*_ALONE), command],
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )

    def _do(
        self,
        *words: str,
        content: bytes = b"",
        command: Sequence[str] = (),
        timeout_s: float = CONNECT_S,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ssh over the existing master. It never opens a connection of its own."""
        try:
            return subprocess.run(
                [*self._command(*_ALONE, *words), *command],
                cwd=self._folder,
                input=content,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StartError(f"no response within {timeout_s:g} s") from None

    def _last_log_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "ssh ended without output"


def _advice(output: str, python: str) -> str:
    """Return the remedy for a failed start of Python on a host."""
    last = output.splitlines()[-1] if output else "no output"
    if "No module named" in output and "nbdist" in last:
        return f"nbdist is not installed for {python} there: install it, or use --python PATH"
    if "not found" in last or "No such file" in last or last == "127":
        return f"{python} does not exist: use --python PATH, or set `python` in hosts.toml"
    return f"{python} failed there: {last}"


def _escaped(path: str) -> str:
    """Escape the colons of a path, which separate the parts of ssh's forwards."""
    return path.replace(":", "\\:")
