"""Ends jobs, in a process that nobody waits for: schedulers may be slow, or not there just now.

`python -m nbdist.cluster.schedulers.cancel` reads commands from standard input, a JSON list of
lists of words.
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
"""Before each try, until two in turn have worked: one may come before the job is known."""

_ENOUGH = 2
_COMMAND_S = 60.0


def cancel(commands: Sequence[Sequence[str]]) -> None:
    """Have these run; returns at once."""
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
        process.returncode = 0  # it outlives this process, or is a zombie until that ends


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
