"""Doubles of PBS, Grid Engine, LSF and HTCondor: commands that run a job's parts on this machine.

They accept only the commands that nbdist sends, according to the manuals, and print the real
output. The job script, its processes and their end are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

COMMANDS = {
    "pbs": ("qsub", "qstat", "qdel"),
    "sge": ("qsub", "qstat", "qdel"),
    "lsf": ("bsub", "bjobs", "bkill"),
    "htcondor": ("condor_submit", "condor_q", "condor_rm"),
}
_SUBMITTED = {
    "pbs": "12[].head",
    "sge": 'Your job-array 12.1-{n}:1 ("nbdist") has been submitted',
    "lsf": "Job <12> is submitted to default queue <normal>.",
    "htcondor": "Submitting job(s).\n{n} job(s) submitted to cluster 12.",
}
_VARIABLE = {"pbs": "PBS_ARRAYID", "sge": "SGE_TASK_ID", "lsf": "LSB_JOBINDEX"}
_STATES = {
    "pbs": ("    job_state = Q", "    job_state = R"),
    "sge": (
        "     12 0.55500 nbdist     me           qw    11/22/2026 19:00:00               1 1-3:1",
        "     12 0.55500 nbdist     me           r     11/22/2026 19:00:00 all.q@h       1 1",
    ),
    "lsf": ("PEND", "RUN"),
    "htcondor": ("1", "2"),
}
_LOOK = {
    "pbs": ["-f", "-t", "12[]"],
    "sge": ["-u", pwd.getpwuid(os.getuid()).pw_name],
    "lsf": ["-noheader", "-o", "stat", "12"],
    "htcondor": ["-format", "%d\n", "JobStatus", "12"],
}
_END = {"pbs": ["12[]"], "sge": ["12"], "lsf": ["12"], "htcondor": ["12"]}
_FORGOTTEN = {"pbs": "qstat: Unknown Job Id 12[]", "lsf": "Job <12> is not found"}
"""Messages about a job that has ended. The other schedulers print nothing."""


def cancelling() -> list[psutil.Process]:
    """Return the processes that cancel jobs of this process's current and earlier clusters."""
    return [process for process in psutil.Process().children(recursive=True) if cancels(process)]


def cancels(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        return "nbdist.cluster.schedulers.cancel" in " ".join(process.cmdline())
    return False


def install(folder: Path, launcher: str) -> None:
    """Write the commands of a scheduler to a folder. Put the folder first in PATH."""
    for name in COMMANDS[launcher]:
        file = folder / name
        command_line = f'{sys.executable} -m tests.schedulers {folder} {launcher} {name} "$@"'
        file.write_text(f"#!/bin/sh\nexec {command_line}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)


def _submit(folder: Path, launcher: str, words: list[str]) -> None:
    text = Path(words[-1]).read_text() if words else sys.stdin.read()
    (folder / "submitted").write_text(text)
    if launcher == "htcondor":
        count, commands = _condor(text)
    else:
        found = re.search(r"(?m)^#\S* (?:-t 1-|-J nbdist\[1-)(\d+)", text)
        count = int(found[1]) if found else 1
        commands = [["sh", "-c", text]] * count
    own = [{_VARIABLE.get(launcher, "NOTHING"): str(n + 1)} for n in range(count)]
    wait = f'while [ -e {folder}/held ]; do sleep 0.1; done; exec "$@"'
    with (folder / "output").open("ab") as output:
        parts = [
            subprocess.Popen(
                ["sh", "-c", wait, "sh", *command],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for command, env in zip(commands, own, strict=True)
        ]
    (folder / "pids").write_text(json.dumps([part.pid for part in parts]))
    print(_SUBMITTED[launcher].format(n=count))


def _condor(text: str) -> tuple[int, list[list[str]]]:
    settings = dict(re.findall(r"(?m)^(\w+) = (.*)$", text))
    found = re.search(r"(?m)^queue (\d+)$", text)
    assert found is not None
    words = settings["arguments"].strip('"').split()
    command = [settings["executable"], *words]
    count = int(found[1])
    return count, [[w.replace("$(Process)", str(n)) for w in command] for n in range(count)]


def _look(folder: Path, launcher: str, words: list[str]) -> None:
    assert words == _LOOK[launcher], words
    if (folder / "down").exists():
        sys.exit("cannot connect to server")
    waiting, running = _STATES[launcher]
    held = (folder / "held").exists()
    if held:
        (folder / "looked").touch()
        print(waiting)
    if any(map(_runs, json.loads((folder / "pids").read_text()))):
        print(running)
    elif not held and launcher in _FORGOTTEN:
        sys.exit(_FORGOTTEN[launcher])


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _end(folder: Path, launcher: str, words: list[str]) -> None:
    assert words == _END[launcher], words
    if not (folder / "refused").exists():  # the first request fails, as if the server were down
        (folder / "refused").touch()
        sys.exit("cannot connect to server")
    for pid in json.loads((folder / "pids").read_text()):
        if _runs(pid):
            os.killpg(pid, signal.SIGTERM)


def main() -> None:
    folder, launcher, command, *words = sys.argv[1:]
    does = dict(zip(COMMANDS[launcher], (_submit, _look, _end), strict=True))
    if words == ["--version"]:
        print("Version: 6.1.3")
        return
    does[command](Path(folder), launcher, words)


if __name__ == "__main__":
    main()


def output_reader(capture: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns all output so far."""
    outputs: list[str] = []

    def read_output() -> str:
        outputs.append(capture.readouterr().out)
        return "".join(outputs)

    return read_output
