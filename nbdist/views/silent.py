"""A view that shows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.views.cell import Shareable


class SilentView:
    """For a cell that is run again, which has been seen before."""

    def add(self, record: Shareable) -> None: ...

    def flush(self) -> None: ...

    def say(self, line: str) -> None: ...
