"""Loading and unloading of the IPython extension."""

from __future__ import annotations

import atexit
import difflib
import re
import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbdist.magics.completion import option_matcher
from nbdist.magics.devices import DeviceMagics
from nbdist.magics.dist import DistMagics
from nbdist.magics.export import ExportMagics
from nbdist.magics.options import MAGICS, with_body
from nbdist.magics.plan import PlanMagics
from nbdist.magics.trace import TraceMagics
from nbdist.session import deleted_cells
from nbdist.session.discovery import offer
from nbdist.views.result_table import ResultTable

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

_UNKNOWN = re.compile(r"magic(?: function)? `(%+)(\w+)` not found\.$")
"""IPython's message about a magic that does not exist."""

_loaded: dict[int, tuple[DistMagics, Any]] = {}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics (`%load_ext nbdist`)."""
    magics = DistMagics(shell)
    sharing = (PlanMagics, DeviceMagics, TraceMagics, ExportMagics)
    shell.register_magics(magics, *(of(shell, magics) for of in sharing))
    matcher = option_matcher()
    shell.Completer.custom_matchers.append(matcher)
    _printers(shell).for_type(ResultTable, magics.skip_shown)
    shell.events.register("pre_execute", magics.forget_shown)
    shell.events.register("post_run_cell", suggest_magic)
    shell.events.register("pre_run_cell", deleted_cells.note)
    shell.input_transformers_cleanup.append(with_body)
    atexit.register(magics.end)
    _loaded[id(shell)] = (magics, matcher)
    waiting = offer()
    if waiting:
        sys.stdout.write(f"{waiting}\n")


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the cluster, and remove the hooks (`%unload_ext nbdist`)."""
    magics, matcher = _loaded.pop(id(shell))
    magics.end()
    atexit.unregister(magics.end)
    shell.Completer.custom_matchers.remove(matcher)
    shell.events.unregister("pre_execute", magics.forget_shown)
    shell.events.unregister("post_run_cell", suggest_magic)
    shell.events.unregister("pre_run_cell", deleted_cells.note)
    shell.input_transformers_cleanup.remove(with_body)
    _printers(shell).pop(ResultTable, None)


def suggest_magic(result: ExecutionResult) -> None:
    """Print the closest magic of nbdist if the cell failed on one that does not exist."""
    error = result.error_in_exec
    unknown = _UNKNOWN.search(str(error)) if isinstance(error, UsageError) else None
    if unknown is None:
        return
    close = difflib.get_close_matches(unknown[2], MAGICS, n=1, cutoff=0.7)
    if close:
        asked, forms = f"{unknown[1]}{close[0]}", MAGICS[close[0]].forms
        sys.stderr.write(f"did you mean {asked if asked in forms else forms[0]}?\n")


def _printers(shell: Any) -> Any:
    """Return the formatter that calls functions by the type of the shown object."""
    return shell.display_formatter.ipython_display_formatter
