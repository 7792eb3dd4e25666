"""A start while it happens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from nbdist.records import Phase
from nbdist.views.cluster.workers import StartPicture
from nbdist.views.surface import new_surface

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import WorkerState


class StartView:
    """Shows each phase of a start while it happens."""

    def __init__(self, title: str) -> None:
        self._surface = new_surface()
        self._picture = StartPicture(title)

    def run(self, name: str, work: Callable[[], str | None]) -> None:
        self._show(under_way=name, said="")
        started = time.perf_counter()
        detail = work() or ""
        phase = Phase(name=name, seconds=time.perf_counter() - started, detail=detail)
        self._show(done=(*self._picture.done, phase), under_way="", said="")

    def say(self, text: str) -> None:
        """How the phase goes that is under way."""
        if text != self._picture.said:
            self._show(said=text)

    def finish(self, title: str, workers: tuple[WorkerState, ...]) -> None:
        seconds = sum(phase.seconds for phase in self._picture.done)
        self._show(title=f"{title} ({seconds:.1f} s)", workers=workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._show(failed=True)

    def _show(self, **changes: Any) -> None:
        self._picture = replace(self._picture, **changes)
        self._surface.show(self._picture)
