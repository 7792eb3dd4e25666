"""State of the cell that runs on a rank. Each cell starts with a new one."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nbdist.records import CellOptions, CellRequest
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nbdist.worker.runtime.stop_point import StopPoint

_NO_CELL = CellRequest(
    number=0, source="", label=0, strategy=None, awaits=False, options=CellOptions(guard=0)
)


@dataclass(slots=True)
class Progress:
    """Progress of the cell, counted across all of its fits.

    Attributes:
        step: last step that began; 0 if none has.
        tested: batches that the cell has passed without training on them.
        batches: batches that `fit` has trained on.
        epochs: last epoch that a `fit` has begun.
        passed_rows: rows of the batches that a resumed `fit` has skipped; 0 if none.
        trained: True after a `fit` or a loop, until the next one begins.
    """

    step: int = 0
    tested: int = 0
    batches: int = 0
    epochs: int = 0
    passed_rows: int = 0
    trained: bool = False


@dataclass(slots=True)
class ShuffleOrder:
    """Order of the samples of one `fit`, and their division over the ranks.

    Attributes:
        seed: seed of the order; 0 if the `fit` does not shuffle, or if the user set a seed.
        sharding: description of the division; empty if unknown.
    """

    seed: int = 0
    sharding: str = ""


class FitCounter(Protocol):
    """Counter of the fits of a cell."""

    @property
    def fits(self) -> int:
        """The number of fits that have begun."""
        ...

    def packed(self) -> bytes:
        """Return the records of the fits, encoded."""
        ...


class NamesOfCell:
    """Names that a cell reads and binds: nbdist saves and compares their values.

    Args:
        names: all names.
        makes: those that the cell binds before it reads them. Until the cell binds such a name,
            its value may come from an earlier run of the cell and does not count.
    """

    def __init__(self, names: Iterable[str] = (), makes: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._before: dict[str, weakref.ref[Any]] = {}
        for name in makes:
            with contextlib.suppress(KeyError, TypeError):  # numbers have no weakrefs; not saved
                self._before[name] = weakref.ref(engine_shell().user_ns[name])

    def bound(self) -> tuple[str, ...]:
        """Return the names that this run has bound by now."""
        namespace = engine_shell().user_ns
        return tuple(
            name
            for name in self._names
            if name in namespace
            and (name not in self._before or self._before[name]() is not namespace[name])
        )


def _refuse_to_stop() -> NoReturn:
    raise RuntimeError("no cell runs on this rank")


class CellState:
    """State of one cell on one rank.

    Args:
        request: the cell; by default, an empty request: no cell runs.
        stop_point: context that defers an interrupt until all ranks can stop at the same step.

    Attributes:
        names: names whose values nbdist saves or compares.
        source: checksum of the source text.
        shuffles: number of data sets that the cell has shuffled without a seed.
        generators: number of generators of NumPy that the cell has made without a seed.
        order: sample order of the `fit`, `evaluate` or `predict` that began last.
        fits: counter of the fits; None before the first.
        unfinished: True if the cell has left steps under way.
        loops: training loops of the cell whose steps run on all replicas, by number.
        loop_stop: last step of these loops before a stop; None before the first.
        passes: position of the cell in its loops; None without checkpoints.
    """

    def __init__(
        self,
        request: CellRequest = _NO_CELL,
        stop_point: Callable[[], contextlib.AbstractContextManager[StopPoint]] = _refuse_to_stop,
    ) -> None:
        self.request = request
        self.stop_point = stop_point
        self.progress = Progress()
        self.names = NamesOfCell(request.names, request.makes)
        self.source = zlib.crc32(request.source.encode())
        self.shuffles = 0
        self.generators = 0
        self.order = ShuffleOrder()
        self.fits: FitCounter | None = None
        self.unfinished = False
        self.loops: dict[int, Any] = {}
        self.loop_stop: StopPoint | None = None
        self.passes: Any = None
