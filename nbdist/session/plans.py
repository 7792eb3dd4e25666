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
    """Return the plan of a step.

    Args:
        cluster: the cluster whose workers trace the step.
        cell: the step.
        options: the data of the step and the constraints on the plan, with `planning.only`.
        label: the notebook's execution count.
        header: the line above the cell in the notebook.

    Raises:
        CellError: no layout fits, or the step cannot be traced.
        UsageError: the workers do not run JAX, or the cell is not a step.
    """
    run = cluster.run(cell, structs.replace(options, strategy="pjrt"), label=label, header=header)
    if run.plan is None:
        raise PlanError("the workers returned no plan: report this as a bug of nbdist")
    return run.plan
