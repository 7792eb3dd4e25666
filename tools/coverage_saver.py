"""Plugin of coverage.py: each process saves its data every second.

nbdist ends engines with SIGKILL, so data that is only saved at their exit would be lost. A fork
server itself has no saver: a fork while another thread holds a lock would block the child.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from coverage import Coverage

PERIOD_S = 1.0
_FORK_SERVERS = {
    os.getpid()
    for name in ("forkserver.server", "forkserver.remote_start")
    if any(arg.endswith(name) for arg in sys.orig_argv)
}


def coverage_init(_registry: Any, _options: dict[str, Any]) -> None:
    """Start the saver of this process. coverage.py calls this also after each fork."""
    if os.getpid() not in _FORK_SERVERS:
        threading.Thread(target=_save, name="coverage-saver", daemon=True).start()


def _save() -> None:
    while True:
        time.sleep(PERIOD_S)
        running = Coverage.current()
        if running is not None:
            running.save()
