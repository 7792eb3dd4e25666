"""Process that runs the command of a submitted program, and stores its exit status.

`python -m nbdist.jobs.supervisor COMMAND ...` runs in the folder of the program, in a session of
its own. It continues when the notebook's kernel ends. `process.json` names the process of the
program. Its time of change shows other hosts that the supervisor runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nbdist.utils.files import replace_file
from nbdist.utils.processes import process_of
from nbdist.utils.signals import signal_at_end_of_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT, EXIT_STATUS, PROGRAM = "output.log", "exit-status", "process.json"
"""Files for the output of the program, for its exit status and for its process, beside it."""

BEAT_S = 10.0
"""Seconds between two changes of `process.json`."""


def _prepare() -> None:
    """Unblock SIGTERM in the program. Linux sends it when this process is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal_at_end_of_parent(signal.SIGTERM)


def _beat() -> None:
    with contextlib.suppress(OSError):  # its folder was deleted, or the disk was full
        os.utime(PROGRAM)


def run(command: Sequence[str]) -> None:
    """Run a command, and pass SIGTERM on to it. The caller has blocked the signal until then.

    Args:
        command: the words.
    """
    with Path(OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_prepare,  # noqa: PLW1509 - this process has one thread
        )
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with contextlib.suppress(OSError):  # on a full disk, the program runs nevertheless
        replace_file(Path(PROGRAM), msgspec.json.encode(process_of(process.pid)))
    signal.signal(signal.SIGALRM, lambda _number, _frame: _beat())
    signal.setitimer(signal.ITIMER_REAL, BEAT_S, BEAT_S)
    status = process.wait()
    code = 128 - status if status < 0 else status
    replace_file(Path(EXIT_STATUS), f"{code}\n".encode())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(sys.argv[1:])
