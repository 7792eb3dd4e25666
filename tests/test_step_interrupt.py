"""An interrupt of a step cell: the same steps on all ranks, and the state is whole afterwards."""

from __future__ import annotations

import _thread
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import Rows, StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import nbdist
    from nbdist.records import Speech

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
def interrupted(cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Interrupts this process's main thread, as the kernel's, once a rank has reported a step."""
    hear = cluster._hear

    def arm(step: int) -> None:
        done = threading.Event()

        def heard(record: Speech) -> None:
            hear(record)
            if done.is_set() or not isinstance(record, Rows):
                return
            if any(metrics.step >= step for metrics in record.unpacked()):
                done.set()
                _thread.interrupt_main()

        monkeypatch.setattr(cluster._receiver, "_handle", heard)

    return arm


@pytest.mark.parametrize("strategy", ["pjrt", "mirrored"])
@pytest.mark.parametrize("step", [1, 40, 300])
def test_all_stop_at_the_same_step_and_go_on_from_there(
    cluster: nbdist.Cluster, interrupted: Callable[[int], None], strategy: str, step: int
) -> None:
    before = eval(cluster.run(STATE[strategy], strategy=strategy).results[0])
    interrupted(step)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(CELLS[strategy], step=ENDLESS, strategy=strategy)
    made = {m.rank: m.step for m in cluster.last_run.metrics if m.step > 0}
    assert len(made) == 3
    assert len(set(made.values())) == 1
    (steps,) = set(made.values())
    assert steps >= step
    after = {
        eval(text) for text in cluster.run(STATE[strategy], strategy=strategy).results.values()
    }
    assert after == {(before[0] + steps, before[1] + steps)}
    interrupted(10**9)
    run = cluster.run(
        CELLS[strategy], step=StepOptions(data="ones", batch=8, epochs=2), strategy=strategy
    )
    assert np.isfinite(run.loss).all()
