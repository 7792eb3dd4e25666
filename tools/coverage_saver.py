"""Plugin of coverage.py: each process saves its data every second.

nbdist ends engines with SIGKILL, so data that is only saved at their exit would be lost. A kill
during a write leaves a broken file, so the saver copies each complete file. A process that forks
others has no saver: a fork while another thread holds a lock would block the child.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any

from coverage import Coverage
from coverage.exceptions import CoverageException

PERIOD_S = 1.0
_FORKING = ("forkserver.server", "forkserver.remote_start", "schedulers.dial_in")
_WITHOUT_SAVER = {os.getpid()} if any(arg.endswith(_FORKING) for arg in sys.orig_argv) else set()


def coverage_init(_registry: Any, _options: dict[str, Any]) -> None:
    """Start the saver of this process. coverage.py calls this also after each fork."""
    if os.getpid() not in _WITHOUT_SAVER:
        threading.Thread(target=_save, name="coverage-saver", daemon=True).start()


def _save() -> None:
    while True:
        time.sleep(PERIOD_S)
        running = Coverage.current()
        if running is None:
            continue
        try:
            running.save()
            saved = Path(running.get_data().data_filename())
            copy = saved.with_name(f".{saved.name}")
            shutil.copyfile(saved, copy)
            copy.replace(saved.with_name(f"{saved.name}.copy"))
        except (OSError, CoverageException, sqlite3.Error):
            continue  # a test has filled the disk
