"""The command that starts TensorBoard on a folder of event files."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Linux kills this process when the process that started it ends. The module `notf` makes
# TensorBoard skip TensorFlow (tensorboard/compat/__init__.py). This saves 760 MB of memory, and
# 26 s on two busy cores.
_PROGRAM = """
import ctypes, signal, sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from tensorboard.main import run_main
run_main()
"""


def is_installed() -> bool:
    """Return True if this environment contains TensorBoard."""
    return importlib.util.find_spec("tensorboard") is not None


def board_command(folder: Path, port: str) -> list[str]:
    """Return the command. TensorBoard listens on loopback only.

    Args:
        folder: folder of event files, searched recursively. It may not exist yet.
        port: its port; `0` for a free one.
    """
    arguments = ("--logdir", str(folder), "--host", "127.0.0.1", "--port", port)
    return [sys.executable, "-c", _PROGRAM, *arguments]
