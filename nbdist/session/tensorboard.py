"""TensorBoard on what was kept: `%dist_tensorboard`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbdist.errors import StartError, UsageError
from nbdist.settings import Settings
from nbdist.telemetry.run_reader import find
from nbdist.telemetry.run_writer import EVENTS_FOLDER

if TYPE_CHECKING:
    from pathlib import Path


_POLL_S = 0.05
_SHOWN_CHARACTERS = 2000
_ADDRESS = re.compile(r"^TensorBoard \S+ at (http://\S+)", re.MULTILINE)

# It asks Linux to end it with the notebook's kernel, however that goes. The module of that name
# tells TensorBoard (tensorboard/compat/__init__.py) to do without TensorFlow, which is 760 MB of
# memory and 26 s on two busy cores.
_PROGRAM = """
import ctypes, signal, sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from tensorboard.main import run_main
run_main()
"""


class Boards:
    """The TensorBoards of one notebook, one for each folder; on loopback only."""

    def __init__(self) -> None:
        self._boards: dict[Path, Board] = {}

    def open(self, run: str | None = None) -> BoardPicture:
        """Where TensorBoard shows a run; left out, all that are kept.

        Raises:
            UsageError: TensorBoard is not installed, or there is no such run.
            StartError: it did not start; its own words are told.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise UsageError("TensorBoard is not installed: type %pip install tensorboard")
        root = Settings.from_environment().runs_path
        folder = find(root, run).path / EVENTS_FOLDER if run else root
        return self.open_folder(folder, f"run {run}" if run else f"the runs in {root}")

    def open_folder(self, folder: Path, shown: str) -> BoardPicture:
        """Where TensorBoard shows a folder, which `shown` tells in words.

        Raises:
            StartError: it did not start; its own words are told.
        """
        if folder in self._boards and not self._boards[folder].is_there():
            self._boards.pop(folder).close()
        if folder not in self._boards:
            self._boards[folder] = Board(folder, Settings.from_environment().start_timeout_s)
        return BoardPicture(self._boards[folder].address, shown)

    def close(self) -> None:
        """End them."""
        while self._boards:
            self._boards.popitem()[1].close()


class Board:
    """A TensorBoard in a process of its own.

    Args:
        folder: what it shows; it need not be there yet.
        timeout_s: bound on its start.

    Attributes:
        address: where a browser on this machine finds it.

    Raises:
        StartError: it ended, or said nothing for so long.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = ("--logdir", str(folder), "--host", "127.0.0.1", "--port", "0")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # an interrupt of the kernel is none of it
        )
        try:
            self.address = self._await_address(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def is_there(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it. May be called more than once."""
        self._process.kill()  # it only reads; the server of its data ends when its input closes
        self._process.wait()
        self._log.close()

    def _await_address(self, deadline: float) -> str:
        while not (found := _ADDRESS.search(self._said())):
            if not self.is_there() or time.monotonic() > deadline:
                said = self._said()[-_SHOWN_CHARACTERS:].strip()
                raise StartError(f"TensorBoard did not start; its last words:\n{said}")
            time.sleep(_POLL_S)
        return found[1]

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@dataclass(frozen=True)
class BoardPicture:
    """A link, which opens on the machine of the notebook's kernel.

    Attributes:
        address: for a browser there.
        shown: what TensorBoard shows, in words.
    """

    address: str
    shown: str

    def html(self) -> str:
        link = f'<a href="{escape(self.address)}" target="_blank">{escape(self.address)}</a>'
        return f"<div>nbdist: TensorBoard on {escape(self.shown)}: {link}</div>"

    def lines(self) -> list[str]:
        return [f"nbdist: TensorBoard on {self.shown}: {self.address}"]
