"""Hosts on this machine: separate network, name and process namespaces, each with an sshd.

Hosts share only the disk of this machine. Each has its own address on a bridge, name and process
table. Killing a host's first process is like turning off its power.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_PROGRAMS = ("ip", "ss", "tc", "unshare", "nsenter", "ssh", "sshd", "ssh-keygen")
_SBIN = ("/usr/sbin", "/sbin")
_BEGIN_S = 30.0
_NETNS_ETC = Path("/etc/netns")

_ALONE = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")

SSHD = """
ListenAddress {address}
Port 22
HostKey {key}
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/../authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100:30:200
MaxSessions 100
AcceptEnv PYTHONPATH
"""

SSH = """
Host {prefix}* {subnet}.*
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  SendEnv PYTHONPATH
"""


def program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


def _free_number() -> int:
    """Return the number of an unused network, also if a killed process left others behind."""
    numbers = ((os.getpid() + k) % 190 for k in range(190))
    return next(n for n in numbers if not Path(f"/sys/class/net/nb{n}-br").exists())


def _do(*command: str) -> str:
    path = program(command[0])
    assert path is not None
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _limit(inside: tuple[str, ...], device: str, rate: str) -> None:
    """Limit the rate at which a device sends. Empty removes the limit.

    Segments of 64 KiB on these devices need a larger burst: with one of 64 kB, TCP reached half of
    300 Mbit/s between two hosts (2026-11-29).
    """
    if rate:
        limits = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _do(*inside, "tc", "qdisc", "add", "dev", device, "root", *limits)
    else:
        _do(*inside, "tc", "qdisc", "del", "dev", device, "root")


@functools.cache
def missing() -> str:
    """Return the reason why hosts cannot be created. Empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in _PROGRAMS if program(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (openssh-server, openssh-client, iproute2)"
    name = f"nb-try{os.getpid() % 1000}"
    with contextlib.ExitStack() as undo:
        try:
            _do("ip", "netns", "add", name)
            undo.callback(_do, "ip", "netns", "del", name)
            _do("ip", "link", "add", name, "type", "bridge")
            undo.callback(_do, "ip", "link", "del", name)
            _do("ip", "netns", "exec", name, *_ALONE, "true")
        except RuntimeError as error:
            return f"network namespaces are forbidden: {error}"
    return ""


needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing())


class Host:
    """A host.

    Attributes:
        name: name of the host, known to the other hosts and to this machine.
        address: address on the bridge.
        folder: folder of its files.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._init: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))

    def power_on(self) -> None:
        """Start the host's sshd and wait until it responds."""
        assert self._init is None
        config = SSHD.format(address=self.address, folder=self.folder, key=self.folder / "key")
        (self.folder / "sshd_config").write_text(config)
        sshd = f"exec {program('sshd')} -D -e -f {self.folder}/sshd_config"
        begin = ["sh", "-c", f"hostname {self.name}; {sshd}"]
        with (self.folder / "sshd.log").open("ab") as log:
            self._init = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *_ALONE, *begin],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _BEGIN_S
        while not self.listening():
            assert time.monotonic() < deadline, (self.folder / "sshd.log").read_text()
            time.sleep(0.02)

    def power_off(self) -> None:
        """End all processes of the host at once, without a message to anyone."""
        if self._init is not None:
            self._init.kill()  # `--kill-child` ends the first process, and so all others
            self._init.wait()
            self._init = None
            assert repeat_until(lambda: not self.processes() and not self.listening(), _BEGIN_S)

    def processes(self) -> list[psutil.Process]:
        """Return all processes on the host, as this machine sees them."""
        found = []
        for pid in _do("ip", "netns", "pids", self.name).split():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                found.append(psutil.Process(int(pid)))
        return found

    def freeze(self) -> None:
        for process in self.processes():
            process.suspend()

    def thaw(self) -> None:
        for process in self.processes():
            process.resume()

    def listening(self) -> set[tuple[str, int]]:
        """Return the TCP addresses and ports that processes on the host listen on."""
        lines = _do("ip", "netns", "exec", self.name, "ss", "-Hltn").splitlines()
        ends = (line.split()[3].rpartition(":") for line in lines)
        return {(address.strip("[]"), int(port)) for address, _, port in ends}

    def cut(self) -> None:
        """Disconnect the network cable."""
        _do("ip", "link", "set", self._cable, "down")

    def mend(self) -> None:
        _do("ip", "link", "set", self._cable, "up")

    def wall_off(self, *, on: bool) -> None:
        """Let the host reach this machine, but no other walled-off host."""
        state = "on" if on else "off"
        _do("ip", "link", "set", "dev", self._cable, "type", "bridge_slave", "isolated", state)

    def throttle(self, rate: str) -> None:
        """Limit the rate of data to the host, such as `100mbit`. Empty removes the limit."""
        _limit((), self._cable, rate)

    def throttle_sending(self, rate: str) -> None:
        """Limit the rate of data from the host, or replace the limit. Empty removes it."""
        inside = ("ip", "netns", "exec", self.name)
        if "tbf" in _do(*inside, "tc", "qdisc", "show", "dev", "eth0"):
            _limit(inside, "eth0", "")
        if rate:
            _limit(inside, "eth0", rate)

    def throttle_to(self, other: Host, rate: str) -> None:
        """Limit the rate of data from the host to another one. Empty removes the limit."""
        inside = ("ip", "netns", "exec", self.name, "tc")
        if not rate:
            _do(*inside, "qdisc", "del", "dev", "eth0", "root")
            return
        _do(*inside, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb")
        limit = ("classid", "1:2", "htb", "rate", rate)  # other data have no class and no limit
        _do(*inside, "class", "add", "dev", "eth0", "parent", "1:", *limit)
        match = ("u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:2")
        _do(*inside, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *match)

    def own_disk(self, folder: Path) -> None:
        """Mount an empty disk at `folder` on the host until it is powered off."""
        first = next(p for p in self.processes() if "sshd" in p.name())
        _do("nsenter", "-t", str(first.pid), "-m", "mount", "-t", "tmpfs", "tmpfs", str(folder))

    @property
    def _cable(self) -> str:
        return f"{self.name}-v"

    def wire(self, bridge: str, hosts: str) -> None:
        """Connect the host to a network. `hosts` are the lines of its /etc/hosts."""
        etc = _NETNS_ETC / self.name
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(hosts)
        _do("ip", "netns", "add", self.name)
        _do("ip", "link", "add", self._cable, "type", "veth", "peer", "eth0", "netns", self.name)
        _do("ip", "link", "set", self._cable, "master", bridge, "up")
        _do("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _do("ip", "-n", self.name, "link", "set", "eth0", "up")
        _do("ip", "-n", self.name, "link", "set", "lo", "up")

    def remove(self) -> None:
        self.power_off()
        for undo in (("ip", "link", "del", self._cable), ("ip", "netns", "del", self.name)):
            with contextlib.suppress(RuntimeError):
                _do(*undo)
        shutil.rmtree(_NETNS_ETC / self.name, ignore_errors=True)


class Hosts:
    """Hosts that are powered on, in one network with this machine.

    Attributes:
        each: the hosts.
        address: address of this machine.
        ssh_config: file for `ssh -F` to reach the hosts.
    """

    def __init__(self, count: int) -> None:
        number = _free_number()
        self._subnet = f"10.{64 + number}.77"
        self._prefix = f"nb{number}-"
        self._bridge = f"nb{number}-br"
        self._count = count
        self._undo = contextlib.ExitStack()
        self.address = f"{self._subnet}.254"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="nb-hosts-")))
            self.each = [self._host(n) for n in range(1, self._count + 1)]
            self.ssh_config = self._write_ssh()
            _do("ip", "link", "add", self._bridge, "type", "bridge")
            undo.callback(_do, "ip", "link", "del", self._bridge)
            _do("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
            _do("ip", "link", "set", self._bridge, "up")
            known = ["127.0.0.1 localhost", f"{self.address} head"]
            known += [f"{host.address} {host.name}" for host in self.each]
            Path("/run/sshd").mkdir(exist_ok=True)
            for host in self.each:
                undo.callback(host.remove)
                host.wire(self._bridge, "\n".join(known) + "\n")
                host.power_on()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.each]

    def _host(self, number: int) -> Host:
        name = f"{self._prefix}{number}"
        return Host(name, f"{self._subnet}.{number}", self.folder / name)

    def _write_ssh(self) -> Path:
        """Write an SSH configuration that resolves the names, so /etc/hosts is unchanged."""
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "id"))
        shutil.copy(self.folder / "id.pub", self.folder / "authorized_keys")
        keys = [(host, (host.folder / "key.pub").read_text().split()[:2]) for host in self.each]
        lines = [f"{host.address} {' '.join(key)}\n" for host, key in keys]
        (self.folder / "known_hosts").write_text("".join(lines))
        general = SSH.format(prefix=self._prefix, subnet=self._subnet, folder=self.folder)
        named = [f"Host {host.name}\n  HostName {host.address}\n" for host in self.each]
        config = self.folder / "ssh_config"
        config.write_text("".join(named) + general)
        return config


def main() -> None:
    """Run `python -m tests.netns 4` for hosts to experiment with, until Enter is pressed."""
    with Hosts(int(sys.argv[1])) as hosts:
        print("ssh -F", hosts.ssh_config, *hosts.names)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        sys.stdin.readline()


if __name__ == "__main__":
    main()
