"""A view that shows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.records import FitBegun, MimeBundle, RecoveryRecord, StepBegun
    from nbdist.views.run.cell_output import Shareable


class SilentView:
    """For a cell that is run again, which has been seen before."""

    def add(self, record: Shareable) -> None: ...

    def flush(self) -> None: ...

    def say(self, line: str) -> None: ...

    def resume(self, begun: StepBegun | FitBegun) -> None: ...

    def recovering(self, reason: str) -> None: ...

    def recovered(self, recovery: RecoveryRecord) -> None: ...

    def shrink(self, host_of: Mapping[int, str]) -> None: ...

    def close(
        self, drawn: Callable[[], tuple[MimeBundle, MimeBundle]], said: tuple[str, ...]
    ) -> None: ...
