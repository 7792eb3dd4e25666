"""Training loop in a plain cell against a step cell with the same body, on 2 workers.

Both read the same list of batches.
"""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING

from benchmarks import ours
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

_BATCHES = """
batches = [
    (images[i : i + {batch}], labels[i : i + {batch}]) for i in range(0, SAMPLES, {batch})
]
"""
_JIT = """
@jax.jit
def train_step(params, velocity, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    params = jax.tree.map(lambda p, v: p - 0.01 * v, params, velocity)
    return params, velocity, loss
"""
_BODY = {
    "mirrored": STEP["mirrored"].replace("x, y = batch\n", ""),
    "pjrt": "params, velocity, loss = train_step(params, velocity, x, y)\n",
}
_LOOP = """
import itertools
for x, y in itertools.islice(itertools.cycle(batches), {steps}):
{body}
"""


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with (
            ours.cluster(scale, PROCESSES, strategy) as one,
            ours.cluster(scale, PROCESSES, strategy) as other,
        ):
            for length in lengths(scale, strategy):
                yield _case(scale, (one, other), strategy, *length)


def _case(
    scale: Scale,
    clusters: tuple[nbdist.Cluster, nbdist.Cluster],
    strategy: str,
    name: str,
    size: Size,
    steps: int,
    turn_s: float,
) -> Case:
    options = StepOptions(data="batches", epochs=1000, steps=steps)
    step = Cell(f"x, y = batch\n{_BODY[strategy]}loss", options)
    cells = Cell(loop_of(strategy, steps)), step
    title = f"{strategy}, a {name} on 2 workers, in a loop against a step cell"
    setup = setup_of(size, strategy)
    return compared(scale, title, clusters, strategy, setup, cells, turn_s, TARGET)


def setup_of(size: Size, strategy: str) -> str:
    """Return a cell that creates the model and a list of batches."""
    setup = size.data() + size.model(strategy) + _BATCHES.format(batch=size.batch)
    return setup + _JIT if strategy == "pjrt" else setup


def loop_of(strategy: str, steps: int) -> str:
    """Return a training loop over the batches."""
    return _LOOP.format(steps=steps, body=indent(_BODY[strategy], "    "))
