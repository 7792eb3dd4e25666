"""Why there is no plan, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.plan.cost import Target
    from nbdist.plan.model import Model
    from nbdist.records import Planning


def none_as_asked(model: Model, target: Target, wishes: Planning) -> str:
    """Of no layout that is as it was asked for."""
    asked = ", ".join(f"{name}={size}" for name, size in wishes.fixed.items())
    devices = target.topology.devices
    rows = "data times micro" if "micro" in wishes.fixed else "data"
    apart = f"; the batch and the model cannot both be cut: {model.apart}" if model.apart else ""
    return (
        f"no layout over {devices} devices is as asked for ({asked}): the axes' sizes multiply to "
        f"{devices}, {rows} divides the batch of {model.rows}, and the model has "
        f"dimensions that can be cut so often{apart}"
    )


def gib(nbytes: float) -> str:
    """`46.3 GiB`; of less than one, `12.5 MiB`."""
    unit, scale = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{nbytes / scale:,.3g} {unit}"
