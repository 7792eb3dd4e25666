"""Log files of a fork server and its children, with their output outside of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LOG_FOLDER = "log"
FORK_SERVER_LOG = "forkserver"


def log_file(folder: Path, name: str) -> Path:
    """Return the log file of a child or of the fork server in the cluster's folder."""
    return folder / LOG_FOLDER / f"{name}.log"


def read_tail(folder: Path, name: str, lines: int) -> str:
    """Return the last lines of a log; empty if there is no log."""
    path = log_file(folder, name)
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
