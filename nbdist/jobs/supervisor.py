"""Process that runs the command of a submitted program, and stores its exit status.

`python -m nbdist.jobs.supervisor COMMAND ...` runs in the folder of the program, in a session of
its own. It continues when the notebook's kernel ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

OUTPUT, EXIT_STATUS = "output.log", "exit-status"
"""Files for the output of the program and for its exit status, beside it."""

_PR_SET_PDEATHSIG = 1


def _end_with_supervisor() -> None:
    """Let Linux send SIGTERM to the program when this process is killed. Others do not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run(command: Sequence[str]) -> None:
    """Run a command, and pass SIGTERM on to it.

    Args:
        command: the words.
    """
    begun: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for process in begun:
            process.terminate()

    signal.signal(signal.SIGTERM, receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # its parent has blocked it
    with Path(OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_supervisor,  # noqa: PLW1509 - this process has one thread
        )
    begun.append(process)
    if received:  # before the process began
        process.terminate()
    status = process.wait()
    draft = Path(f".{EXIT_STATUS}")
    draft.write_text(f"{128 - status if status < 0 else status}\n")
    draft.rename(EXIT_STATUS)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(sys.argv[1:])
