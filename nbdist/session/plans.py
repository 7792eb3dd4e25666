"""Plans of steps that are not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from nbdist.records import Plan, StepOptions
    from nbdist.session.cluster import Cluster


def planned(
    cluster: Cluster, cell: str, step: StepOptions, *, label: int = 0, header: str = ""
) -> Plan:
    """How a step would be laid out.

    Args:
        cluster: whose workers trace it.
        cell: the step.
        step: its data, and what is asked of the plan; `planning.only` is set.
        label: the notebook's execution count.
        header: the line above the cell in the notebook.

    Raises:
        CellError: it fits in no way, or cannot be traced.
        UsageError: the workers have no JAX, or the cell is no step.
    """
    run = cluster.run(cell, strategy="pjrt", step=step, label=label, header=header)
    if run.plan is None:
        raise PlanError("no plan came back from the workers")
    return run.plan
