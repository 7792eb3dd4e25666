"""What the children of a fork server write outside of cells: a file for each, in its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LOG_FOLDER = "log"


def log_file(folder: Path, name: str) -> Path:
    """That of a child, or of the fork server itself (`fork_server`); `folder` is the cluster's."""
    return folder / LOG_FOLDER / f"{name}.log"


def read_tail(folder: Path, name: str, lines: int) -> str:
    """The last lines of it; empty where there are none."""
    path = log_file(folder, name)
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
