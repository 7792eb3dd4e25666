"""Cells that the user has deleted from the notebook since the extension was loaded."""

from __future__ import annotations

from nbdist.telemetry.frontend_request import this_request

_deleted: set[str] = set()
"""Ids of the cells. A cell that runs again exists."""


def note(_info: object = None) -> None:
    """Store the ids that the front end sends with the cell that begins.

    It sends each id once, with any cell.
    """
    asked = this_request()
    _deleted.update(asked.deleted)
    _deleted.discard(asked.cell)


def ids() -> frozenset[str]:
    """Return the ids of the deleted cells; empty if the front end does not send them."""
    return frozenset(_deleted)
