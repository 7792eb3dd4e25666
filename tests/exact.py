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
BATCH = 4
HELD_STEP = 102
"""Step before which a run waits for a fault. The next checkpoint is 20 steps after the last one."""

AHEAD = 2
"""Number of batches that a run reads ahead."""

FAULT_STEP = HELD_STEP - AHEAD
"""Number of steps before a fault. Their losses are reported, so none dies with a rank."""

HELD = """
import os, time
class Held:
    def __len__(self):
        return len(xs) // {batch}
    def __iter__(self):
        for step in range(len(self)):
            deadline = time.monotonic() + 60
            while step == {step} and not os.path.exists({path!r}) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield xs[{batch} * step:{batch} * (step + 1)]
held = Held()
"""
"""Batches of `xs`. Those from `step` on wait for a file, at most a minute."""


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
        steps: number of steps, more than `HELD_STEP` with `meanwhile`.
        meanwhile: called once all ranks have reported `FAULT_STEP` steps. The run waits for it
            before the next step, so a slow thread is not too late.
        **saving: further fields of `Saving`.
    """
    cluster.run(setup(BATCH))
    saved = Saving(folder=str(folder / "saved"), every_steps=20, **saving)  # type: ignore[arg-type]
    if meanwhile is None:
        options = StepOptions(data="xs", batch=BATCH, steps=steps)
        return cluster.run(STEP, step=options, saving=saved)
    assert steps > HELD_STEP
    mark = folder / "meanwhile"

    def act() -> None:
        try:
            meanwhile()
        finally:
            mark.touch()

    cluster.run(HELD.format(batch=BATCH, step=HELD_STEP, path=str(mark)))
    with contextlib.ExitStack() as done:
        rows = FAULT_STEP * cluster.world_size
        done.callback(after(folder, rows - 1, act).join)
        return cluster.run(STEP, step=StepOptions(data="held", steps=steps), saving=saved)


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
