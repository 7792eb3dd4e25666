"""Real Slurm of Debian: a slurmd on each namespaced host, and slurmctld on the first."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import pytest

from tests import netns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "nsenter")
_BEGIN_S = 30.0
_END_S = 30.0

CONF = """
ClusterName=nbdist
SlurmctldHost={head}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2,defer
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
SlurmdTimeout=8
MessageTimeout=8
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=shut Nodes=ALL MaxTime=INFINITE State=DOWN
"""


def missing() -> str:
    """Return the reason why Slurm cannot run. Empty if it can."""
    if reason := netns.missing():
        return reason
    lacking = [name for name in _PROGRAMS if netns.program(name) is None]
    return f"{', '.join(lacking)} not installed (slurmctld, slurmd, munge)" if lacking else ""


needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())


class Slurm:
    """Slurm on these hosts. Its commands find it by `SLURM_CONF`.

    Attributes:
        conf: configuration file.
    """

    def __init__(self, hosts: netns.Hosts) -> None:
        self._hosts = hosts
        self._folder = Path(tempfile.mkdtemp(prefix="nb-slurm-"))
        self._folder.chmod(0o711)  # munge requires that all users can reach its socket
        self._undo = contextlib.ExitStack()
        self._entered: list[subprocess.Popen[bytes]] = []
        self.conf = self._folder / "slurm.conf"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            (self._folder / "state").mkdir()
            self._write_conf()
            key, sock = self._folder / "munge.key", self._folder / "munge.sock"
            self._do("mungekey", "-c", "-k", str(key))
            own = ["--key-file", key, "--socket", sock, "--pid-file", self._folder / "munge.pid"]
            own += ["--seed-file", self._folder / "seed", "--log-file", self._folder / "munge.log"]
            undo.enter_context(self._running("munged", "--force", "--foreground", *map(str, own)))
            self._await(sock.exists, "munged")
            undo.callback(self._end)
            self._begin(self._hosts.each[0], "slurmctld", "-D", "-i", "-f", str(self.conf))
            for host in self._hosts.each:
                self.power_on(host)
            self._await(lambda: self.idle() == len(self._hosts.each), "slurmd")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def power_on(self, host: netns.Host) -> None:
        """Start the host's slurmd. It ends with the host."""
        (self._folder / host.name).mkdir(exist_ok=True)
        self._begin(host, "slurmd", "-D", "-N", host.name, "-f", str(self.conf))

    def _begin(self, host: netns.Host, command: str, *words: str) -> None:
        """Start a program in all namespaces of a host."""
        first = next(p for p in host.processes() if "sshd" in p.name())
        with (self._folder / f"{host.name}-{command}.out").open("ab") as log:
            entered = subprocess.Popen(
                [
                    *("nsenter", "-t", str(first.pid), "-n", "-m", "-u", "-p"),
                    *(str(netns.program(command)), *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._entered.append(entered)

    def _end(self) -> None:
        for host in self._hosts.each:
            for process in host.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name().startswith("slurm"):
                        process.kill()
        for entered in self._entered:
            entered.wait(_END_S)

    def idle(self) -> int:
        """Return the number of idle hosts."""
        return int(self._do("sinfo", "-h", "-t", "idle", "-p", "main", "-o", "%D") or 0)

    def jobs(self) -> dict[str, str]:
        """Return the state of each unfinished job by its number."""
        lines = self._do("squeue", "-h", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def occupy(self, hosts: int) -> str:
        """Submit a job that occupies `hosts` hosts. Returns its number."""
        words = ("--exclusive", f"--nodes={hosts}", "--output=/dev/null", "--wrap", "sleep 600")
        return self._do("sbatch", "--parsable", *words).strip()

    def control(self, *words: str) -> None:
        self._do("scontrol", *words)

    def cancel(self, job: str, *words: str) -> None:
        self._do("scancel", *words, job)

    def log(self) -> str:
        """Return the log of slurmctld."""
        return (self._folder / "ctld.log").read_text(errors="replace")

    def _write_conf(self) -> None:
        (self._folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # skips the detection of cgroups
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} NodeHostname={host.name} "
            "CPUs=2 RealMemory=2000 State=UNKNOWN"
            for host in self._hosts.each
        )
        self.conf.write_text(
            CONF.format(
                head=self._hosts.each[0].name,
                address=self._hosts.each[0].address,
                folder=self._folder,
                nodes=nodes,
            )
        )

    def _do(self, command: str, *words: str) -> str:
        done = subprocess.run(
            [str(netns.program(command)), *words],
            env={**os.environ, "SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_BEGIN_S,
        )
        if done.returncode:
            raise RuntimeError(f"{command} {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def _running(self, command: str, *words: str) -> Iterator[None]:
        with (self._folder / f"{command}.out").open("ab") as log:
            process = subprocess.Popen(
                [str(netns.program(command)), *words],
                env={**os.environ, "SLURM_CONF": str(self.conf)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()

    def _await(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _BEGIN_S
        while True:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                if done():
                    return
            if time.monotonic() > deadline:
                logs = sorted(self._folder.glob("*.log")) + sorted(self._folder.glob("*.out"))
                reason = "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in logs)
                raise RuntimeError(f"{what} is not ready:\n{reason}")
            time.sleep(0.1)


def main() -> None:
    """Run `python -m tests.slurm 4` for a cluster to experiment with, until Enter is pressed."""
    with netns.Hosts(int(sys.argv[1])) as hosts, Slurm(hosts) as slurm:
        print(f"SLURM_CONF={slurm.conf} listen={hosts.address}", *hosts.names, flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        sys.stdin.readline()


if __name__ == "__main__":
    main()
