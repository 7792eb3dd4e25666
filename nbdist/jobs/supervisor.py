"""Process that runs the command of a submitted program, and stores its exit status.

`python -m nbdist.jobs.supervisor COMMAND ...` runs in the folder of the program, in a session of
its own. It starts the program when it receives a line, and answers with this line. It continues
when the notebook's kernel ends. `process.json` names the process of the program. The supervisor
sets the modification time of this file every 10 s, so that other hosts know that it runs.
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
from nbdist.utils.processes import BEAT_S, process_of
from nbdist.utils.signals import signal_at_end_of_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUTPUT, EXIT_STATUS, PROGRAM = "output.log", "exit-status", "process.json"
"""Files for the output of the program, for its exit status and for its process, beside it."""

GO = b"go\n"
"""Line that starts the program, and answer after its start."""


def _prepare() -> None:
    """Unblock SIGTERM in the program. Linux sends it when this process is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal_at_end_of_parent(signal.SIGTERM)


def _beat() -> None:
    with contextlib.suppress(OSError):  # its folder was deleted, or the disk was full
        os.utime(PROGRAM)


def run(command: Sequence[str], has_started: Callable[[], None]) -> None:
    """Run a command, and pass SIGTERM on to it. The caller has blocked the signal until then.

    Args:
        command: the words.
        has_started: called after the start, when the exit status of an earlier start is removed.
    """
    with Path(OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_prepare,  # noqa: PLW1509 - this process has one thread
        )
    for file in (EXIT_STATUS, PROGRAM):  # of an earlier start
        Path(file).unlink(missing_ok=True)
    has_started()
    signal.signal(signal.SIGTERM, lambda _number, _frame: process.terminate())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with contextlib.suppress(OSError):  # on a full disk, the program runs nevertheless
        replace_file(Path(PROGRAM), msgspec.json.encode(process_of(process.pid)), 0o644)
    signal.signal(signal.SIGALRM, lambda _number, _frame: _beat())
    signal.setitimer(signal.ITIMER_REAL, BEAT_S, BEAT_S)
    status = process.wait()
    code = 128 - status if status < 0 else status
    replace_file(Path(EXIT_STATUS), f"{code}\n".encode())


def _answer() -> None:
    with contextlib.suppress(BrokenPipeError):  # the kernel has ended
        os.write(sys.stdout.fileno(), GO)
    os.close(sys.stdout.fileno())


if __name__ == "__main__":
    if sys.stdin.buffer.readline() == GO:
        with contextlib.suppress(KeyboardInterrupt):
            run(sys.argv[1:], _answer)
