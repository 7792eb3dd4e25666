"""The ranks of a run that is under way: where they are, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.records import CellEnded, RankStatus, RunWorker

_STATUS: dict[str, RankStatus] = {"ok": "finished", "error": "failed", "interrupted": "interrupted"}


class Roster:
    """Those of one run; not for several threads at once.

    Args:
        workers: as it begins.
    """

    def __init__(self, workers: Iterable[RunWorker]) -> None:
        self._workers = {worker.rank: worker for worker in workers}

    @property
    def workers(self) -> tuple[RunWorker, ...]:
        """As they are now."""
        return tuple(self._workers.values())

    def ended(self, record: CellEnded) -> None:
        """A rank is done with its part."""
        failed = record.failure if record.status == "error" else None
        said = f"{failed.ename}: {failed.evalue}" if failed else ""
        self._set(record.rank, status=_STATUS[record.status], said=said)

    def lost(self, ranks: Iterable[int]) -> None:
        """These died."""
        for rank in ranks:
            self._set(rank, status="dead")

    def replaced(self, pids: Mapping[int, int]) -> None:
        """These run again, in these processes; whoever is not among them is gone."""
        for rank in self._workers:
            if rank in pids:
                self._set(rank, status="running", said="", pid=pids[rank])
            else:
                self._set(rank, status="dead")

    def _set(self, rank: int, **changes: object) -> None:
        self._workers[rank] = msgspec.structs.replace(self._workers[rank], **changes)
