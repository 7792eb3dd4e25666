"""`%dist_show` of 4,000 different arrays.

The whole command is measured against 0.3 s: read the metadata on two engines, merge them into one
placement, and create text, HTML and picture. The page alone is measured against IPython's
pretty-printer on the same records.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from IPython.lib.pretty import pretty

from benchmarks import ours
from benchmarks.case import Case, compare
from nbdist.views.placement.picture import PlacementPicture
from tests.placements import layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import nbdist
    from benchmarks.case import Scale

ARRAYS = 4000
RUNS = 9
HOSTS = 2
MOST_S = 0.3
MADE = """
import jax, numpy as np
grid = jax.make_mesh((HOSTS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
by_rows = jax.NamedSharding(grid, jax.P("data"))

def put(rows):
    data = np.zeros((rows, 2), "float32")
    return jax.make_array_from_callback(data.shape, by_rows, lambda index: data[index])

params = {f"layer_{i}": {n: put(HOSTS * (4 * i + n + 1)) for n in range(4)}
          for i in range(ARRAYS // 4)}
"""


def cases(scale: Scale) -> Iterator[Case]:
    arrays, runs = scale.of(ARRAYS, 16), scale.runs(RUNS)
    with ours.cluster(scale, HOSTS, "pjrt") as cluster, ours.quiet():
        cluster.run(f"HOSTS, ARRAYS = {HOSTS}, {arrays}\n{MADE}", strategy="pjrt")
        times = [_seconds(lambda: _show(cluster, arrays)) for _ in range(runs)]
    yield Case(
        f"`%dist_show` of {arrays:,} arrays on {HOSTS} workers, against the {MOST_S} s allowed",
        median(times),
        MOST_S,
        unit="s",
        target=1.0,
        runs=runs,
    )
    made = layers(arrays)
    records = msgspec.to_builtins(made)
    yield compare(
        f"page of {arrays:,} arrays on {len(made.devices)} devices, against IPython's text",
        lambda: _seconds(lambda: PlacementPicture(made).html()),
        lambda: _seconds(lambda: pretty(records, max_seq_length=arrays)),
        unit="s",
        target=1.0,
        runs=runs,
    )


def _show(cluster: nbdist.Cluster, arrays: int) -> None:
    picture = cluster.show("params")
    assert len(picture.placement.arrays) == arrays
    picture._repr_mimebundle_()


def _seconds(done: Callable[[], object]) -> float:
    began = time.perf_counter()
    done()
    return time.perf_counter() - began
