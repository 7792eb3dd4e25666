"""Client of a notebook's kernel that prints outputs when they arrive, and handles signals."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from nbclient import NotebookClient

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AGAIN_S = 10.0
"""Time that a cell has to end after an interrupt, before the next one (seconds)."""

MOST_INTERRUPTS = 6
"""Number of interrupts before the kernel is killed. ipykernel loses the reply of a cell if an
interrupt arrives between the end of the cell and its reply."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class StoppedError(Exception):
    """A signal arrived between two cells."""


class Progress:
    """Lines about the cells that run.

    Args:
        notebook: the notebook.
        store: writes the notebook with its outputs so far.

    Attributes:
        signal: number of the signal that ended the run; 0 if none did.
        runs: True while the kernel runs a cell.
    """

    def __init__(self, notebook: Any, store: Callable[[], None]) -> None:
        self.signal = 0
        self.runs = False
        self.store = store
        self._count = sum(cell.cell_type == "code" for cell in notebook.cells)
        self._number = 0
        self._began = time.monotonic()
        self._shown: dict[int, str] = {}

    def begin(self, cell: Any) -> None:
        self.runs = False
        if self.signal:
            raise StoppedError
        if cell.cell_type != "code":
            return
        self._number += 1
        first, *rest = cell.source.splitlines() or [""]
        more = f"  (+{formatting.count(len(rest), 'line')})" if rest else ""
        sys.stdout.write(f"\n[{self._number}/{self._count}] {first}{more}\n")
        sys.stdout.flush()

    def show(self, output: Any) -> None:
        """Print the text of an output."""
        text = _text(output)
        self._shown[id(output)] = text
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_cell(self, cell: Any) -> None:
        """Print the displays of the cell that have changed since, and store the notebook."""
        self.runs = False
        for output in cell.outputs:
            if self._shown.get(id(output)) != _text(output):
                self.show(output)
        self._shown.clear()
        self.store()

    def end(self, target: Path, *, failed: bool) -> None:
        took = formatting.duration(time.monotonic() - self._began)
        if self.signal:
            result = f"stopped by {signal.Signals(self.signal).name} in cell {self._number}"
        elif failed:
            result = f"cell {self._number} failed"
        else:
            result = f"{formatting.count(self._count, 'cell')} finished"
        sys.stdout.write(f"\nnbdist: {result} after {took}: {target}\n")


def _text(output: Any) -> str:
    """Return the text of an output, without colours."""
    kind = output["output_type"]
    if kind == "error":
        text = "\n".join(output["traceback"]) + "\n"
    elif kind == "stream":
        text = output["text"]
    else:
        text = output["data"].get("text/plain", "") + "\n"
    return _COLOUR.sub("", text)


class PrintingClient(NotebookClient):  # type: ignore[misc]
    """Client that prints outputs when they arrive, and interrupts its cell on signals.

    Args:
        notebook: The notebook.
        folder: Working directory of its kernel.
        progress: Prints.
    """

    def __init__(self, notebook: Any, folder: Path, progress: Progress) -> None:
        super().__init__(
            notebook,
            timeout=None,
            resources={"metadata": {"path": str(folder)}},
            on_cell_start=lambda cell, **_: self._begin(cell),
            on_cell_executed=lambda cell, **_: progress.end_cell(cell),
        )
        self._progress = progress

    def output(self, outs: Any, msg: Any, display_id: str, cell_index: int) -> Any:
        added = super().output(outs, msg, display_id, cell_index)
        if added is not None:
            self._progress.show(added)
        return added

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "execute_input":
            self._progress.runs = True
            if self._progress.signal:
                self._interrupt()
        return super().process_message(msg, cell, cell_index)

    def _begin(self, cell: Any) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):  # nbclient's handlers kill the kernel
            loop.add_signal_handler(number, self._stop, number)
        self._progress.begin(cell)

    def _stop(self, number: int) -> None:
        """Interrupt the cell; a second signal kills the kernel."""
        again, self._progress.signal = self._progress.signal, number
        if again:
            self._ending = asyncio.ensure_future(self.km.shutdown_kernel(now=True))
        elif self._progress.runs:  # else the kernel would ignore the interrupt
            self._interrupt()

    def _interrupt(self) -> None:
        # A task without a reference may vanish.
        self._ending = asyncio.ensure_future(self._interrupt_until_the_cell_ends())

    async def _interrupt_until_the_cell_ends(self) -> None:
        """Interrupt the kernel. It ignores an interrupt that arrives just before the cell."""
        for _ in range(MOST_INTERRUPTS):
            if not self._progress.runs:
                return
            await self.km.interrupt_kernel()
            await asyncio.sleep(AGAIN_S)
        if self._progress.runs:
            await self.km.shutdown_kernel(now=True)
