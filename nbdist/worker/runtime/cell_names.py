"""The names of the cell that runs: what it trains is saved, and compared over ranks."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Iterable


class NamesOfCell:
    """What a cell reads and binds.

    Args:
        names: all of it.
        makes: those of them that it binds before it reads them. Until then they may mean what an
            earlier run of the cell has left, which is no part of this one.
    """

    def __init__(self, names: Iterable[str] = (), makes: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._before: dict[str, weakref.ref[Any]] = {}
        for name in makes:
            with contextlib.suppress(KeyError, TypeError):  # as of numbers, which are not saved
                self._before[name] = weakref.ref(engine_shell().user_ns[name])

    def bound(self) -> tuple[str, ...]:
        """Those that mean something of this run by now."""
        namespace = engine_shell().user_ns
        return tuple(
            name
            for name in self._names
            if name in namespace
            and (name not in self._before or self._before[name]() is not namespace[name])
        )
