"""Plans of steps that are not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from nbdist.records import CellOptions, Plan
    from nbdist.session.cluster import Cluster


def planned(
    cluster: Cluster, cell: str, options: CellOptions, *, label: int = 0, header: str = ""
) -> Plan:
    """How a step would be laid out.

    Args:
        cluster: whose workers trace it.
        cell: the step.
        options: its step has the data and the constraints on the plan, with `planning.only`.
        label: the notebook's execution count.
        header: the line above the cell in the notebook.

    Raises:
        CellError: it fits in no way, or cannot be traced.
        UsageError: the workers have no JAX, or the cell is no step.
    """
    run = cluster.run(cell, structs.replace(options, strategy="pjrt"), label=label, header=header)
    if run.plan is None:
        raise PlanError("no plan came back from the workers")
    return run.plan
