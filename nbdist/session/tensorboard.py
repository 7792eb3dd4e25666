"""TensorBoard on stored runs: `%dist_tensorboard`."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbdist.errors import StartError, UsageError
from nbdist.settings import Settings
from nbdist.telemetry.board_command import board_command, is_installed
from nbdist.telemetry.run_reader import find, whole_id
from nbdist.telemetry.run_writer import EVENTS_FOLDER

if TYPE_CHECKING:
    from pathlib import Path


_POLL_S = 0.05
_SHOWN_CHARACTERS = 2000
_ADDRESS = re.compile(r"^TensorBoard \S+ at (http://\S+)", re.MULTILINE)


class Boards:
    """TensorBoard processes of one notebook, one for each folder. They listen on loopback only."""

    def __init__(self) -> None:
        self._boards: dict[Path, Board] = {}

    def open(self, run: str | None = None) -> BoardPicture:
        """Open TensorBoard on a run; without `run`, on all stored runs.

        Raises:
            UsageError: TensorBoard is not installed, or the run does not exist.
            StartError: TensorBoard did not start. The message contains its output.
        """
        if not is_installed():
            raise UsageError("TensorBoard is not installed: run %pip install tensorboard")
        root = Settings.from_environment().runs_path
        folder = find(root, whole_id(root, run)).path / EVENTS_FOLDER if run else root
        return self.open_folder(folder, f"run {run}" if run else f"the runs in {root}")

    def open_folder(self, folder: Path, shown: str) -> BoardPicture:
        """Open TensorBoard on a folder. `shown` describes the folder.

        Raises:
            StartError: TensorBoard did not start. The message contains its output.
        """
        if folder in self._boards and not self._boards[folder].is_there():
            self._boards.pop(folder).close()
        if folder not in self._boards:
            self._boards[folder] = Board(folder, Settings.from_environment().start_timeout_s)
        return BoardPicture(self._boards[folder].address, shown)

    def close(self) -> None:
        """End all processes."""
        while self._boards:
            self._boards.popitem()[1].close()


class Board:
    """A TensorBoard process.

    Args:
        folder: the folder of event files. It may not exist yet.
        timeout_s: time limit of the start, in seconds.

    Attributes:
        address: the address for a browser on this machine.

    Raises:
        StartError: the process ended, or did not print its address in time.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            board_command(folder, "0"),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # an interrupt of the kernel does not reach it
        )
        try:
            self.address = self._await_address(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def is_there(self) -> bool:
        """Return True if the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process. May be called more than once."""
        self._process.kill()  # safe: it only reads, and its data server ends with its input
        self._process.wait()
        self._log.close()

    def _await_address(self, deadline: float) -> str:
        while not (found := _ADDRESS.search(self._output())):
            if not self.is_there() or time.monotonic() > deadline:
                output = self._output()[-_SHOWN_CHARACTERS:].strip()
                raise StartError(f"TensorBoard did not start; its output:\n{output}")
            time.sleep(_POLL_S)
        return found[1]

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@dataclass(frozen=True)
class BoardPicture:
    """Link to a TensorBoard. It works on the machine of the notebook's kernel.

    Attributes:
        address: the address for a browser on that machine.
        shown: a description of the shown runs.
    """

    address: str
    shown: str

    def html(self) -> str:
        link = f'<a href="{escape(self.address)}" target="_blank">{escape(self.address)}</a>'
        return f"<div>nbdist: TensorBoard on {escape(self.shown)}: {link}</div>"

    def lines(self) -> list[str]:
        return [f"nbdist: TensorBoard on {self.shown}: {self.address}"]
