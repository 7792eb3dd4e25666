"""Time to read an epoch that is limited by its samples: several workers against one.

The steps of cells and of a training loop under JAX compute next to nothing. One map of tf.data
decodes JPEG pictures, which takes a core. The other one, and the records of grain on one thread,
wait 3 ms for each sample, as for an object store: they measure more workers than the machine has
cores.

Each run trains for three epochs. The second one counts: the first one contains the compilation of
the step, and the last steps of a run are reported without the delay of the others.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.case import Skipped, compare
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale

TARGETS = {2: 0.55, 4: 0.30}
"""Largest ratio to the time of one worker, by the number of workers."""

BATCH, BATCHES, SMOKE_BATCHES = 64, 20, 3
EPOCHS = 3
RUNS = 5
DECODES = "a map that decodes a picture"
STREAMS = {
    DECODES: f"numbers.map(decoded).batch({BATCH})",
    "a map that waits for a sample": f"numbers.map(waited).batch({BATCH})",
    "grain that waits for a sample": f"records.to_iter_dataset(one_thread).batch({BATCH})",
}

DATA = """
import time
import grain, numpy as np, tensorflow as tf

noise = np.random.default_rng(0).integers(0, 256, ({side}, {side}, 3), np.uint8)
picture = tf.io.encode_jpeg(noise)

def wait(number):
    time.sleep(0.003)
    return number

def decoded(number):
    pixels = tf.cast(tf.io.decode_jpeg(picture), tf.float32)
    return tf.reduce_mean(pixels) + tf.cast(number, tf.float32)

def waited(number):  # TensorFlow knows of no effect
    found = tf.numpy_function(wait, [number], tf.int64, stateful=False)
    return tf.cast(tf.reshape(found, []), tf.float32)

numbers = tf.data.Dataset.range({samples})
one_thread = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
records = grain.MapDataset.range({samples}).map(lambda number: np.float32(wait(number)))
"""
STEP = "loss = tf.reduce_mean(batch)"

LOOP_DATA = """
import time
import grain, jax, numpy as np, tensorflow as tf

def waited(number):
    time.sleep(0.003)
    return np.float32(number)

@jax.jit
def train_step(weight, batch):
    loss, gradient = jax.value_and_grad(lambda w: (w * batch).mean())(weight)
    return weight - gradient, loss

one_thread = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
records = grain.MapDataset.range({samples}).map(waited).batch({batch}).to_iter_dataset(one_thread)

def mapped(number):  # TensorFlow knows of no effect
    found = tf.numpy_function(waited, [number], tf.float32, stateful=False)
    return tf.reshape(found, [])

maps = tf.data.Dataset.range({samples}).map(mapped).batch({batch})
"""
LOOP_STREAMS = {
    "records of grain": "records",
    "a map of tf.data that waits": "maps.as_numpy_iterator()",
}
LOOP = """
weight = np.float32(1)
for epoch in range({epochs}):
    for batch in {stream}:
        weight, loss = train_step(weight, batch)
"""


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    batches = scale.of(BATCHES, SMOKE_BATCHES)
    data = DATA.format(side=scale.of(512, 16), samples=BATCH * batches)
    with ExitStack() as clusters, ours.quiet():
        one = clusters.enter_context(ours.cluster(scale, 1, "mirrored"))
        one.run(data)
        for workers, target in TARGETS.items():
            with ours.cluster(scale, workers, "mirrored") as several:
                several.run(data)
                for name, stream in STREAMS.items():
                    case = f"an epoch of {name}: {workers} workers against 1"
                    if name == DECODES and workers > (os.cpu_count() or 1):
                        yield Skipped(case, f"{workers} cores")
                        continue
                    for cluster in (one, several):
                        cluster.run(f"stream = {stream}")
                    options = StepOptions(data="stream", epochs=EPOCHS)
                    epoch_s = partial(
                        _epoch_s, batches=batches, cell=STEP, options=options, strategy="mirrored"
                    )
                    yield compare(
                        case,
                        partial(epoch_s, several),
                        partial(epoch_s, one),
                        unit="s",
                        target=target,
                        runs=scale.runs(RUNS),
                    )
    yield from _loops(scale, batches)


def _loops(scale: Scale, batches: int) -> Iterator[Case]:
    """Measure training loops over records of grain and maps of tf.data."""
    data = LOOP_DATA.format(samples=BATCH * batches, batch=BATCH)
    with ours.quiet(), ours.cluster(scale, 1, "pjrt") as one:
        one.run(data, strategy="pjrt")
        for workers, target in TARGETS.items():
            with ours.cluster(scale, workers, "pjrt") as several:
                several.run(data, strategy="pjrt")
                for name, stream in LOOP_STREAMS.items():
                    cell = LOOP.format(stream=stream, epochs=EPOCHS)
                    epoch_s = partial(
                        _epoch_s, batches=batches, cell=cell, options=None, strategy="pjrt"
                    )
                    yield compare(
                        f"a training loop over {name}: {workers} workers against 1",
                        partial(epoch_s, several),
                        partial(epoch_s, one),
                        unit="s",
                        target=target,
                        runs=scale.runs(RUNS),
                    )


def _epoch_s(
    cluster: nbdist.Cluster, batches: int, cell: str, options: StepOptions | None, strategy: str
) -> float:
    """Return the seconds of the second epoch, from the last step of the first one."""
    ends = ours.step_ends(cluster, cell, options, strategy)
    assert len(ends) == EPOCHS * batches
    return ends[2 * batches - 1] - ends[batches - 1]
