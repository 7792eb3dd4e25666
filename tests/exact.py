"""Small training with known losses, exact in float32 for any number of ranks."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np

from nbdist.records import Saving, StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import nbdist

STEP = "w = w + batch.mean(0) / 64\nloss = w.sum()"


def setup(batch: int) -> str:
    """Return the set-up cell for global batches of this size."""
    return f"""
import numpy as np, jax.numpy as jnp
w = jnp.zeros(3)
xs = np.repeat((np.arange(20_000) // {batch} % 7).astype('float32')[:, None], 3, 1)
"""


def losses(steps: int) -> np.ndarray:
    """Return the losses of the first `steps` steps."""
    return np.cumsum(np.arange(steps) % 7) * 3 / 64


def train(
    cluster: nbdist.Cluster,
    folder: Path,
    steps: int,
    meanwhile: Callable[[], None] | None = None,
    **saving: object,
) -> nbdist.Run:
    """Train in batches of 4 and save every 20 steps.

    Args:
        cluster: cluster to use.
        folder: folder of the checkpoints and runs.
        steps: number of steps.
        meanwhile: called once the run has 60 steps.
        **saving: further fields of `Saving`.
    """
    cluster.run(setup(4))
    options = StepOptions(data="xs", batch=4, steps=steps)
    saved = Saving(folder=str(folder / "saved"), every_steps=20, **saving)  # type: ignore[arg-type]
    with contextlib.ExitStack() as done:
        if meanwhile is not None:
            done.callback(after(folder, 60, meanwhile).join)
        return cluster.run(STEP, step=options, saving=saved)


def steps_of(folder: Path) -> int:
    """Return the number of rows of the newest run. 0 without a run."""
    for run in stored_runs(folder / "runs")[:1]:
        return max((run.count(table) for table in run.tables()), default=0)
    return 0


def after(folder: Path, steps: int, act: Callable[[], None]) -> threading.Thread:
    """Call `act` in a thread once the run has more than `steps` rows."""

    def wait() -> None:
        assert repeat_until(lambda: steps_of(folder) > steps, 60)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
