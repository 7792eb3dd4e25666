"""Steps with signals of training (`--watch`) against the same steps without, on 2 workers.

The steps are those of a step cell and of a loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import loop, ours
from benchmarks.bare import PROCESSES
from benchmarks.models import STEP
from benchmarks.pair import Cell, compared
from benchmarks.step import lengths
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale
    from benchmarks.models import Size

TARGET = 1.02


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with (
            ours.cluster(scale, PROCESSES, strategy) as one,
            ours.cluster(scale, PROCESSES, strategy) as other,
        ):
            for length in lengths(scale, strategy):
                for kind in ("step cell", "loop"):
                    yield _case(scale, (one, other), strategy, kind, *length)


def _case(
    scale: Scale,
    clusters: tuple[nbdist.Cluster, nbdist.Cluster],
    strategy: str,
    kind: str,
    name: str,
    size: Size,
    steps: int,
    turn_s: float,
) -> Case:
    text, options = STEP[strategy], None
    if kind == "loop":
        text = loop.loop_of(strategy, steps)
    else:
        options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    title = f"{strategy}, a {name} of a {kind} on 2 workers, with --watch against without"
    cells, setup = (
        (Cell(text, options, watch=0), Cell(text, options)),
        loop.setup_of(size, strategy),
    )
    return compared(scale, title, clusters, strategy, setup, cells, turn_s, TARGET)
