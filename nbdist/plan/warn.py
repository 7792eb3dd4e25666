"""What of a plan its user should know before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.records import DATA

if TYPE_CHECKING:
    from nbdist.plan.layout import Laid
    from nbdist.records import PlannedTime

FEW_ROWS = 4
"""Samples on a device below which its units are mostly idle."""

MUCH_TRAFFIC = 0.20
"""Of a step, the share of collectives from which on they are worth a word."""


def warnings_of(laid: Laid, time: PlannedTime) -> tuple[str, ...]:
    """In whole sentences."""
    found = []
    each = laid.model.rows / laid.layout.axes[DATA]
    if each <= FEW_ROWS and laid.layout.data > 1:
        found.append(f"each device has {each:.0f} samples of a batch of {laid.model.rows}")
    share = time.exposed / time.step if time.step else 0.0
    if share > MUCH_TRAFFIC:
        slowest = max(time.traffic, key=lambda traffic: traffic.seconds)
        found.append(
            f"{share:.0%} of a step is spent in collectives, most of it over {slowest.level}"
        )
    return tuple(found)
