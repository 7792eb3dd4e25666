"""Two cells that run at the same time and take turns, each on both of two clusters.

Of two equal cells, the one that is sent first is up to 4 % slower. The cells therefore change
places in the middle of the measurement.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.limits import wait_until
from benchmarks.turns import in_turns, sides, take_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import nbdist
    from benchmarks.case import Case, Scale
    from benchmarks.turns import Side, Turn
    from nbdist.records import StepOptions

_LIMIT_S = 600
"""Time limit of the steps."""
_START_LIMIT_S = 60


@dataclass(frozen=True)
class Cell:
    """A cell with steps.

    Attributes:
        text: source of the cell.
        options: options of a step cell; None for a training loop.
        watch: value of `--watch`; None without this option.
    """

    text: str
    options: StepOptions | None = None
    watch: int | None = None


def compared(
    scale: Scale,
    title: str,
    clusters: tuple[nbdist.Cluster, nbdist.Cluster],
    strategy: str,
    setup: str,
    cells: tuple[Cell, Cell],
    turn_s: float,
    target: float,
) -> Case:
    """Return the seconds per step of two cells.

    Args:
        scale: size of the run.
        title: description of the case.
        clusters: two equal clusters.
        strategy: strategy of the cells.
        setup: cell that each cluster runs before.
        cells: our cell and that of the peer.
        turn_s: seconds of a turn.
        target: largest acceptable ratio.
    """
    mine, peer = cells
    parts = [_run(clusters, strategy, setup, (mine, peer), turn_s)]
    if not scale.smoke:
        first, second = _run(clusters, strategy, setup, (peer, mine), turn_s)
        parts.append((second, first))
    return in_turns(scale, title, parts, target)


def _run(
    clusters: tuple[nbdist.Cluster, nbdist.Cluster],
    strategy: str,
    setup: str,
    cells: tuple[Cell, Cell],
    turn_s: float,
) -> tuple[Side, Side]:
    """Run the first cell on the first cluster, and the second on the second."""
    over = threading.Event()
    with ours.quiet(), ThreadPoolExecutor(2) as pool:
        for cluster in clusters:
            cluster.run(setup, strategy=strategy)
        other = pool.submit(_ends, clusters[1], cells[1], strategy)
        running = pool.submit(_turns_once_busy, clusters, turn_s, over)
        try:
            ends = _ends(clusters[0], cells[0], strategy)
        finally:
            over.set()
        turns, other_ends = running.result(_LIMIT_S), other.result(_LIMIT_S)
    return sides(turns, ends, other_ends)


def _ends(cluster: nbdist.Cluster, cell: Cell, strategy: str) -> Sequence[float]:
    return ours.step_ends(cluster, cell.text, cell.options, strategy, watch=cell.watch)


def _turns_once_busy(
    clusters: tuple[nbdist.Cluster, nbdist.Cluster], turn_s: float, over: threading.Event
) -> tuple[Turn, ...]:
    """Take turns once the workers of both clusters have received their cell.

    A worker that is stopped before counts the seconds of its cell from the next turn on.
    """

    def busy() -> bool:
        workers = [worker for cluster in clusters for worker in cluster.workers(measure=False)]
        return over.is_set() or all(worker.state == "busy" for worker in workers)

    wait_until(busy, _START_LIMIT_S, "cells on the workers of both sides")
    return take_turns(ours.pids(clusters[0]), ours.pids(clusters[1]), turn_s, over)
