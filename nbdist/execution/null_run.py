"""A run while it is under way that is not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.records import Metrics, Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.records import AnyEvent, CellRequest, RecoveryRecord, RunStatus


class NullRun:
    """A run that could not be kept, for the reason that it gives at its end."""

    def __init__(self, reason: str) -> None:
        self.id = ""
        self._reason = reason
        self._reported = False

    def placed(self, request: CellRequest) -> CellRequest:
        return request

    def hear(self, record: AnyEvent) -> None:
        self._reported |= isinstance(record, Rows | Metrics)

    def tick(self) -> tuple[str, ...]:
        return ()

    def stops_requested(self) -> int:
        return 0

    def stopping(self) -> None: ...

    def lost(self, ranks: Iterable[int]) -> None: ...

    def recovering(self, reason: str) -> None: ...

    def recovered(self, recovery: RecoveryRecord, pids: Mapping[int, int]) -> None: ...

    def show(self, text: str) -> None: ...

    def close(self) -> None: ...

    def leave(self) -> None: ...

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        del status, error
        return (self._reason,) if self._reported else ()
