"""Layouts of the cells of a program: those of the notebook on as many devices, or new plans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from nbdist.cells.options import cell_options

if TYPE_CHECKING:
    from nbdist.records import CellOptions


def options_for(given: dict[str, Any], devices: int) -> tuple[CellOptions, str]:
    """Return the options of a cell for a number of devices.

    Args:
        given: options as `Job.cell` takes them. `plan` is the name of a file beside the program.
        devices: number of devices of the program.

    Returns:
        The options, and a message if the file is for another number of devices: the cell is then
        planned with the other options. Empty otherwise.

    Raises:
        UsageError: options are wrong, or the file cannot be read.
    """
    file = given.get("plan")
    if file is not None:
        given = {**given, "plan": str(_program().with_name(file))}
    options = cell_options(given)
    plan = None if options.step is None else options.step.planning.given
    if options.step is None or plan is None or plan.devices == devices:
        return options, ""
    planning = structs.replace(options.step.planning, given=None)
    step = structs.replace(options.step, planning=planning)
    text = (
        f"{file} is for {plan.devices} devices ({plan.title}), and the program has {devices}: "
        "nbdist plans the layout again"
    )
    return structs.replace(options, step=step), text


def _program() -> Path:
    """Return the absolute path of the program. It may have changed its folder."""
    return Path(str(sys.modules["__main__"].__file__))
