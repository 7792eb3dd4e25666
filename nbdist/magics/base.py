"""Base classes of magics: the cluster of a notebook, and its shown results."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.magic import Magics
from IPython.display import display

from nbdist.cells.own_modules import imports_of_cell
from nbdist.errors import NoClusterError, UsageError
from nbdist.session.tensorboard import Boards
from nbdist.session.transfer import fingerprint
from nbdist.views import formatting

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.errors import CellError
    from nbdist.session.cluster import Cluster
    from nbdist.views.result_table import ResultTable

    ShownT = TypeVar("ShownT", bound=ResultTable[Any])


_UNDEFINED = {
    "NameError": (re.compile("^name "), re.compile(r"'(\w+)'")),
    "StepError": (re.compile("^not defined on the workers: "), re.compile(r"`(\w+)`")),
}
"""Beginning of the message about undefined names, and each name in it, by the error's class."""


class ClusterMagics(Magics):
    """Magics of a notebook with one cluster, and with data sets moved to its workers."""

    shell: Any

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._started: Cluster | None = None
        self._brought: dict[str, tuple[object, bytes]] = {}
        self._copied: dict[str, int] = {}
        self.boards = Boards()
        self._shown: object = None

    def running_cluster(self, asked: str) -> Cluster:
        """Return the cluster of the notebook.

        Args:
            asked: the magic that needs it, for the error.

        Raises:
            NoClusterError: no cluster is running.
        """
        if self._started is None or not self._started.running:
            raise NoClusterError(asked)
        return self._started

    def shown(self, result: ShownT) -> ShownT:
        """Show a result at once, and return it for assignment.

        IPython does not show it a second time if the magic is the last line of its cell.
        """
        display(result)
        self._shown = result
        return result

    def skip_shown(self, result: ResultTable[Any]) -> None:
        """Let IPython show a result, unless this cell has shown it.

        Raises:
            NotImplementedError: IPython is to show it. Its formatters expect this error.
        """
        if result is not self._shown:
            raise NotImplementedError

    def forget_shown(self) -> None:
        """Let IPython show all results in the cell that begins."""
        self._shown = None

    def has_cluster(self) -> bool:
        """Return True if the notebook has a running cluster."""
        return self._started is not None and self._started.running

    def _refuse_running(self) -> None:
        if self.has_cluster():
            raise UsageError(
                f"{self._started!r} is running: run %dist_restart for fresh workers, "
                "or %dist_stop first"
            )

    def cell_number(self) -> int:
        """Return the prompt number of the running cell. IPython's own counter may be ahead."""
        inputs: list[str] = self.shell.history_manager.input_hist_parsed
        return len(inputs) - 1

    def imported(self) -> list[str]:
        """Return the modules at the top level that the notebook's cells import, until now."""
        cells: list[str] = self.shell.history_manager.input_hist_raw
        bodies = (cell.partition("\n")[2] if cell.startswith("%%") else cell for cell in cells)
        return list(dict.fromkeys(name for body in bodies for name in imports_of_cell(body)))

    def move_data(self, cluster: Cluster, name: str) -> None:
        """Move a data set of the notebook to the workers, unless they have it.

        It moves again if the notebook has changed it.
        """
        here = self.shell.user_ns.get(name)
        if here is None or not (self._has_changed(name, here) or cluster.inspection.lacks(name)):
            return
        size = cluster.push({name: here})
        self._brought[name] = here, fingerprint(here)
        sys.stdout.write(f"nbdist: moved `{name}` from the notebook ({formatting.size(size)})\n")

    def push_hint(self, error: CellError) -> str:
        """Return a line about names of the notebook that a cell lacked on the workers."""
        if error.ename not in _UNDEFINED:
            return ""
        begin, each = _UNDEFINED[error.ename]
        found = each.findall(error.evalue) if begin.match(error.evalue) else []
        here = {name: self.shell.user_ns[name] for name in found if name in self.shell.user_ns}
        modules = {name: one for name, one in here.items() if isinstance(one, ModuleType)}
        imports = [
            f"only the notebook has imported `{name}`: add `{_import_of(one, name)}` to the cell"
            for name, one in modules.items()
        ]
        names = [name for name in here if name not in modules]
        described = ", ".join(f"`{name}` ({describe(here[name])})" for name in names)
        pushes = [f"only the notebook has {described}: run %dist_push {' '.join(names)}"]
        return "\n".join(imports + (pushes if names else []))

    def _has_changed(self, name: str, here: object) -> bool:
        """Return True if a moved data set was replaced or changed since."""
        if name not in self._brought:
            return False
        moved, mark = self._brought[name]
        return moved is not here or mark != fingerprint(here)


def _import_of(module: ModuleType, name: str) -> str:
    return f"import {module.__name__}" + (f" as {name}" if module.__name__ != name else "")


def describe(value: object) -> str:
    """Return the type of a value, and its size if it is an array."""
    size = getattr(value, "nbytes", None)
    kind = type(value).__name__
    return f"{kind}, {formatting.size(size)}" if isinstance(size, int) else kind


class SharedClusterMagics(Magics):
    """Base class of magics that use the cluster of other magics.

    Args:
        shell: the shell of the notebook.
        front: the magics that own the cluster.
    """

    shell: Any

    def __init__(self, shell: InteractiveShell, front: ClusterMagics) -> None:
        super().__init__(shell)
        self._front = front
