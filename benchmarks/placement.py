"""The page of 4,000 arrays that all differ, against IPython's pretty-printer on the records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from IPython.lib.pretty import pretty

from benchmarks.case import compare
from nbdist.views.placement import PlacementPicture
from tests.placements import layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.case import Case

ARRAYS = 4000
RUNS = 9


def cases() -> Iterator[Case]:
    made = layers(ARRAYS)
    records = msgspec.to_builtins(made)
    yield compare(
        f"{ARRAYS:,} arrays on {len(made.devices)} devices drawn, over printed by IPython",
        lambda: _seconds(lambda: PlacementPicture(made).html()),
        lambda: _seconds(lambda: pretty(records, max_seq_length=ARRAYS)),
        unit="s",
        target=1.0,
        runs=RUNS,
    )


def _seconds(done: Callable[[], object]) -> float:
    began = time.perf_counter()
    done()
    return time.perf_counter() - began
