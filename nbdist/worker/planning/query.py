"""Query for a plan: the step, the devices and the conditions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.model import Role
    from nbdist.records import Planning, Spec


@dataclass(frozen=True)
class PlanQuery:
    """Step to plan, with all that its plan depends on.

    Attributes:
        traced: Closed jaxpr of the step.
        inputs: Path and role of each input.
        target: Hardware of the plan.
        request: Requested properties of the plan.
        pinned: Specs of arrays that keep the user's sharding, by path.
    """

    traced: Any
    inputs: Sequence[tuple[str, Role]]
    target: Target
    request: Planning
    pinned: Mapping[str, Spec] = field(default_factory=dict)
