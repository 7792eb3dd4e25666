"""Steps with signals of training (`--watch`) against the same steps without, on 2 workers.

Both sides run at the same time and take turns. The steps are those of a step cell and of a loop.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks import loop, ours
from benchmarks.bare import PROCESSES
from benchmarks.models import STEP
from benchmarks.step import lengths
from benchmarks.turns import in_turns
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale
    from benchmarks.models import Size

TARGET = 1.02
_LIMIT_S = 600
"""Time limit of the steps."""


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with (
            ours.cluster(scale, PROCESSES, strategy) as watched,
            ours.cluster(scale, PROCESSES, strategy) as plain,
        ):
            for length in lengths(scale, strategy):
                for kind in ("step cell", "loop"):
                    yield _case(scale, watched, plain, strategy, kind, *length)


def _case(
    scale: Scale,
    watched: nbdist.Cluster,
    plain: nbdist.Cluster,
    strategy: str,
    kind: str,
    name: str,
    size: Size,
    steps: int,
    turn_s: float,
) -> Case:
    cell, options = STEP[strategy], None
    if kind == "loop":
        cell = loop.loop_of(strategy, steps)
    else:
        options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    over = threading.Event()
    with ours.quiet(), ThreadPoolExecutor(2) as pool:
        for cluster in (watched, plain):
            cluster.run(loop.setup_of(size, strategy), strategy=strategy)
        other = pool.submit(ours.step_ends, plain, cell, options, strategy)
        turns = pool.submit(loop.turns_once_busy, watched, plain, turn_s, over)
        try:
            ends = ours.step_ends(watched, cell, options, strategy, watch=0)
        finally:
            over.set()
        peer_ends = other.result(_LIMIT_S)
    title = f"{strategy}, a {name} of a {kind} on 2 workers, with --watch against without"
    return in_turns(scale, title, turns.result(_LIMIT_S), ends, peer_ends, TARGET)
