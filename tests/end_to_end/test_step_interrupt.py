"""Interrupted step cells make the same steps on all ranks and keep a consistent state."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import Output, Rows, StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import nbdist
    from nbdist.records import AnyEvent

SETUP = """
import numpy as np, tensorflow as tf, jax, jax.numpy as jnp
ones = np.ones(64, "float32")
count, weights = 0, jnp.zeros(3)
with strategy.scope():
    counted = tf.Variable(0, trainable=False,
                          aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    variable = tf.Variable([0.0, 0.0])
"""
CELLS = {
    "pjrt": "count += 1\nweights = weights + batch.mean()\nloss = weights[0]",
    "mirrored": """
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(batch) * tf.reduce_sum(variable)
(gradient,) = tape.gradient(loss, [variable])
variable.assign_sub(gradient)
counted.assign_add(1)
loss
""",
}
STATE = {
    "pjrt": "(int(count), float(weights[0]))",
    "mirrored": "(int(counted.numpy()), -float(variable[0]))",
}
ENDLESS = StepOptions(data="ones", batch=8, epochs=1_000_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=3) as running:
        running.run(SETUP, strategy="mirrored")
        yield running


@pytest.fixture
def interrupt_on(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[AnyEvent], bool], float], None]:
    """Function that interrupts this process some seconds after a matching record."""
    deliver = cluster._worker_group.receiver.subscribers.deliver

    def arm(matches: Callable[[AnyEvent], bool], delay_s: float) -> None:
        fired = threading.Event()

        def intercept(record: AnyEvent) -> None:
            deliver(record)
            if not fired.is_set() and matches(record):
                fired.set()
                interrupt_after(delay_s)

        monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)

    return arm


def interrupt_after(*seconds: float) -> None:
    """Interrupt this process after each of these numbers of seconds."""
    for delay in seconds:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()


def has_reported(step: int) -> Callable[[AnyEvent], bool]:
    return lambda record: (
        isinstance(record, Rows) and any(metrics.step >= step for metrics in record.unpacked())
    )


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        ("pjrt", 300),
        ("mirrored", 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("pjrt", 1), ("mirrored", 300), ("pjrt", 40), ("mirrored", 40))
        ),
    ],
)
def test_interrupted_ranks_stop_at_the_same_step(
    cluster: nbdist.Cluster, interrupt_on: Any, strategy: str, step: int
) -> None:
    before = eval(cluster.run(STATE[strategy], strategy=strategy).results[0])
    interrupt_on(has_reported(step), 0)
    with pytest.raises(KeyboardInterrupt) as stopped:
        cluster.run(CELLS[strategy], step=ENDLESS, strategy=strategy)
    last_steps = {m.rank: m.step for m in cluster.last_run.metrics if m.step > 0}
    assert len(last_steps) == 3
    assert len(set(last_steps.values())) == 1
    (steps,) = set(last_steps.values())
    assert steps >= step
    assert str(stopped.value) == f"stopped after step {steps:,}; the workers keep their variables"
    after = {
        eval(text) for text in cluster.run(STATE[strategy], strategy=strategy).results.values()
    }
    assert after == {(before[0] + steps, before[1] + steps)}
    run = cluster.run(
        CELLS[strategy], step=StepOptions(data="ones", batch=8, epochs=2), strategy=strategy
    )
    assert np.isfinite(run.loss).all()


NAPPING = """
import time
nap_s = {nap_s}
def slow():
    while True:
        time.sleep(nap_s)
        yield np.ones(9, "float32")
"""


def step_counts(cluster: nbdist.Cluster) -> set[int]:
    """Return the different step counts that the ranks carried out of the run."""
    return {int(text) for text in cluster.run("int(count)", strategy="pjrt").results.values()}


NAPS = """
import time
naps = [0, 0, 0.6, 2.5] if rank == 0 else []
def nap():
    seconds = naps.pop(0) if naps else 0
    if seconds:
        print("napping", flush=True)
        time.sleep(seconds)
def slow():
    while True:
        nap()
        yield np.ones(9, "float32")
count = 0
"""
"""Rank 0 sleeps twice in a step while the others wait for it."""

FIT = """
import keras
class Naps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        nap()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rows = np.ones((6000, 1), "float32")
model.fit(rows, rows, batch_size=6, callbacks=[Naps()])
"""


def is_nap(record: AnyEvent) -> bool:
    return isinstance(record, Output) and "napping" in record.text


NAP_INTERRUPT_S = 0.2
"""Delay in seconds, shorter than the first nap.

nbdist repeats the interrupt while ranks that already agreed on a last step wait again.
"""


@pytest.mark.full
def test_one_interrupt_waits_for_long_steps(cluster: nbdist.Cluster, interrupt_on: Any) -> None:
    cluster.run(NAPS, strategy="pjrt")
    interrupt_on(is_nap, NAP_INTERRUPT_S)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(CELLS["pjrt"], step=StepOptions(data="slow"), strategy="pjrt")
    last_steps = step_counts(cluster)
    assert len(last_steps) == 1
    assert last_steps.pop() > 0


@pytest.mark.full
def test_one_interrupt_waits_for_long_batches_of_a_fit(
    cluster: nbdist.Cluster, interrupt_on: Any
) -> None:
    interrupt_on(is_nap, NAP_INTERRUPT_S)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(NAPS + FIT, strategy="mirrored")
    last_steps = cluster.run("int(model.optimizer.iterations.numpy())", strategy="mirrored").results
    assert len(set(last_steps.values())) == 1


@pytest.mark.parametrize("late_s", [0.7, pytest.param(2.5, marks=pytest.mark.full)])
def test_rank_that_starts_after_the_interrupt_stops_too(
    cluster: nbdist.Cluster, late_s: float
) -> None:
    cluster.run(NAPPING.format(nap_s="0") + "count = 0", strategy="pjrt")
    late = cluster.workers()[1].pid
    os.kill(late, signal.SIGSTOP)
    threading.Timer(0.3 + late_s, os.kill, (late, signal.SIGCONT)).start()
    interrupt_after(0.3)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(CELLS["pjrt"], step=StepOptions(data="slow"), strategy="pjrt")
    assert len(step_counts(cluster)) == 1


@pytest.mark.full  # test_fail_fast.py aborts a collective
def test_second_interrupt_cancels_a_long_step(cluster: nbdist.Cluster) -> None:
    cluster.run(NAPPING.format(nap_s="60"), strategy="pjrt")
    interrupt_after(0.5, 3.5)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cluster.run(CELLS["pjrt"], step=StepOptions(data="slow"), strategy="pjrt")
    assert time.monotonic() - started > 3.5
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}
