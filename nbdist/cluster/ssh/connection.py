"""One connection to a host, through the user's own `ssh`, which carries all that goes there.

A master (`ssh -M -N`) is started for each host; programs run over it, and ports of this machine are
brought to Unix sockets in a folder of the host's, which only its user can open: nothing of it
listens on a network. The command line has names that were checked (`inventory.py`) and paths of our
own; all else goes through standard input, so that no shell sees it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import StartError
from nbdist.utils.processes import wait_or_kill

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.records import Host

CONNECT_S = 10.0
"""How long a host may take to answer."""

ALIVE_S, ALIVE_TIMES = 2, 5
"""A connection on which so many questions, so far apart, had no answer is over."""

_END_S = 2.0
_START_FORK_SERVER_S = 30.0
_POLL_S = 0.02
_OPTIONS = {
    "BatchMode": "yes",  # there is nobody who could type a password
    "ConnectTimeout": str(int(CONNECT_S)),
    "ServerAliveInterval": str(ALIVE_S),
    "ServerAliveCountMax": str(ALIVE_TIMES),
    "StreamLocalBindUnlink": "yes",
    "ClearAllForwardings": "yes",  # those of the user's own configuration
    "ForwardX11": "no",
    "ForwardAgent": "no",
    "RequestTTY": "no",
    "ControlPersist": "no",  # else another process than the one that was started has it
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
}


class Connection:
    """A connection to one host, with what comes and goes through it.

    Args:
        host: which.
        folder: of this machine, for its sockets; paths of sockets are relative to it.
        name: of this connection among those of the folder.
        config: of ssh; empty for the user's own.

    Attributes:
        host: which.
        name: of this connection.
    """

    def __init__(self, host: Host, folder: Path, name: str, config: str = "") -> None:
        self.host = host
        self.name = name
        self._folder = folder
        self._control = f"{name}.ctl"
        self._log = folder / "log" / f"{name}.log"
        self._config = ["-F", str(Path(config).expanduser().absolute())] if config else []
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> int:
        """Connect; returns the pid of what holds the connection.

        Raises:
            StartError: the host cannot be reached; it says why.
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
                raise StartError(self._why())
            if time.monotonic() > deadline:
                self.close()
                raise StartError(f"ssh did not connect within {CONNECT_S:g} s")
            time.sleep(_POLL_S)
        return process.pid

    def is_open(self) -> bool:
        """Whether there is a master that answers here, of this process or another."""
        return (self._folder / self._control).exists() and self._do("-O", "check").returncode == 0

    def start_fork_server(self, content: bytes) -> bytes:
        """Start a fork server there.

        Args:
            content: what it is to be like, for standard input.

        Returns:
            What it said of itself.

        Raises:
            StartError: it failed, or took too long; it says what to do.
        """
        python = self.host.python or sys.executable  # nothing in it means anything to a shell
        command = [f"exec {python} -m nbdist.cluster.forkserver.remote_start"]
        done = self._do(content=content, command=command, timeout_s=_START_FORK_SERVER_S)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or str(done.returncode)
            raise StartError(_advice(said, python))
        return done.stdout

    def why_lost(self) -> str:
        """What there is to say of a host that is lost, beside that: nothing."""
        return ""

    def bring_here(self, there: str, here: str) -> None:
        """A socket of the host's is reached as `here`, in the folder.

        Raises:
            StartError: ssh refuses.
        """
        self._forward("-L", f"./{_escaped(here)}:{_escaped(there)}")

    def bring_there(self, ports: Iterable[int], prefix: str) -> None:
        """Ports of this machine's loopback are reached there as `<prefix>:<port>`.

        Raises:
            StartError: ssh, or the host's sshd, refuses.
        """
        ends = (f"{_escaped(f'{prefix}:{port}')}:127.0.0.1:{port}" for port in ports)
        self._forward(*(word for end in ends for word in ("-R", end)))

    def _forward(self, *words: str) -> None:
        done = self._do("-O", "forward", *words)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise StartError(
                f"its sshd forwards no sockets ({said}): "
                "AllowTcpForwarding and AllowStreamLocalForwarding have to be `yes` there"
            )

    def close(self) -> None:
        """End it, and all that goes through it, whoever has begun it."""
        with contextlib.suppress(StartError):
            self._do("-O", "exit", timeout_s=_END_S)
        if self._process is not None:
            wait_or_kill(self._process, _END_S)

    def _command(self, *words: str) -> list[str]:
        host, config = self.host, [] if "-F" in words else self._config
        user = ["-l", host.user] if host.user else []
        port = ["-p", str(host.port)] if host.port else []
        return ["ssh", *config, "-S", self._control, *user, *port, *words, "--", host.name]

    def _do(
        self,
        *words: str,
        content: bytes = b"",
        command: Sequence[str] = (),
        timeout_s: float = CONNECT_S,
    ) -> subprocess.CompletedProcess[bytes]:
        """Over the master, which has what was configured; never with a connection of its own."""
        alone = ["-F", "none", "-o", "BatchMode=yes", "-o", "ProxyCommand=false"]
        try:
            return subprocess.run(
                [*self._command(*alone, *words), *command],
                cwd=self._folder,
                input=content,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StartError(f"no answer within {timeout_s:g} s") from None

    def _why(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "ssh ended without a word"


def _advice(said: str, python: str) -> str:
    """What to do about a program that failed."""
    last = said.splitlines()[-1] if said else "no word"
    if "No module named" in said and "nbdist" in last:
        return f"nbdist is not installed for {python} there: install it, or type --python PATH"
    if "not found" in last or "No such file" in last or last == "127":
        return f"there is no {python}: type --python PATH, or name it in hosts.toml"
    return f"{python} failed there: {last}"


def _escaped(path: str) -> str:
    """A path as ssh's forwards take it: its colons are not theirs."""
    return path.replace(":", "\\:")
