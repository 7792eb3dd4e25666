"""Cancellation of jobs in a separate process, because schedulers may be slow or unavailable.

`python -m nbdist.cluster.schedulers.cancel` reads a JSON list of commands, each a list of words,
from standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAUSES_S = (0, 2, 5, 15, 30, 60)
"""Pauses before each attempt. The first may succeed before the scheduler knows the job."""

_ENOUGH = 2  # successes in a row
_COMMAND_S = 60.0


def cancel(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in a separate process, and return immediately."""
    if commands:
        process = subprocess.Popen(
            [sys.executable, "-m", "nbdist.cluster.schedulers.cancel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(list(map(list, commands))).encode())
        process.returncode = 0  # nobody waits for it, so `Popen` must not warn


def _run(command: list[str]) -> None:
    worked = 0
    for pause in _PAUSES_S:
        time.sleep(pause)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        worked = worked + 1 if done.returncode == 0 else 0
        if worked == _ENOUGH:
            return


def main() -> None:
    commands = json.load(sys.stdin)
    with ThreadPoolExecutor(len(commands) or 1) as pool:
        list(pool.map(_run, commands))


if __name__ == "__main__":
    main()
