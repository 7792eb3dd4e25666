"""Steps of loops on a rank with several replicas, as with several GPUs: two logical CPUs.

A stand-in for the worker gives the rank. `tests/end_to_end/test_lifted_loops.py` runs loops on real
workers, each with one replica.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

from tests.references import plainly

pytestmark = pytest.mark.processes

PROGRAM = textwrap.dedent("""
    import ast
    from types import SimpleNamespace
    import numpy as np, tensorflow as tf, keras
    from IPython.core.interactiveshell import InteractiveShell
    from nbdist.records import CellOptions, StepOptions, StepProgram, StepRequest
    from nbdist.worker.lifting.callees import Callees
    from nbdist.worker.lifting.lifted_loop import Arguments
    from nbdist.worker.lifting.rewrite import lift
    from nbdist.worker.runtime import context
    from nbdist.worker.tensorflow.lifted_step import MirroredLoopStep

    replicas = REPLICAS
    InteractiveShell.instance()
    context._worker = SimpleNamespace(
        rank=0, world_size=1, request=SimpleNamespace(label=1, options=CellOptions()),
        identity=SimpleNamespace(telemetry=False), cell_state=SimpleNamespace(source=1),
        reporter=SimpleNamespace(note=lambda *_words, **_options: None))
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05)
    cell = '''
    total = tf.zeros(2)
    for step, (xb, yb) in enumerate(data):
        with tf.GradientTape() as tape:
            predicted = model(xb, training=True)
            loss = LOSS
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        total = total + tf.stack([loss, tf.cast(step, tf.float32)])
        near = tf.reduce_sum(tf.cast(tf.abs(predicted - yb) < 0.5, tf.int32))
        print(step, loss, predicted, near)
    '''
    import textwrap
    cell = textwrap.dedent(cell).strip()
    tree = ast.parse(cell)
    _, programs = lift(tree, cell, Callees(tree, globals()))
    (program,) = programs.values()
    loop = program.loop
    assert tuple(loop.given) == ("xb", "yb", "step"), loop.given
    assert loop.carried == ("total",)
    request = StepRequest(
        StepProgram(body="", given=tuple(loop.given), reads=loop.reads, carried=(),
                    carried_lines={}, report=""),
        StepOptions(data="data"))
    x = np.random.default_rng(0).normal(size=(26, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    total, made, seen = tf.zeros(2), None, []
    for number, start in enumerate(range(0, 26, 8)):
        xb, yb = tf.constant(x[start:start + 8]), y[start:start + 8]
        arguments = Arguments((xb, yb, number), (total,))
        if made is None:
            made = MirroredLoopStep(request, program, globals(), strategy, arguments)
        batch = made.batch(arguments)
        made.ready(batch)
        made.read(made.step(batch))
        names = "total", "loss", "near", "predicted"
        total, loss, near, predicted = made.outputs(names)
        seen.append([float(loss), int(near), predicted.numpy().ravel().tolist()])
    (gradients,) = made.last(["grads"])
    made.finish()
    outcome = {
        "seen": seen, "total": total.numpy().tolist(),
        "gradients": [g.numpy().ravel().tolist() for g in gradients],
        "weights": [w.ravel().tolist() for w in model.get_weights()],
    }
""")
LOSSES = {
    "mean": "tf.reduce_mean((predicted - yb) ** 2)",
    "sum": "tf.reduce_sum((predicted - yb) ** 2)",
}


def outcomes(name: str) -> dict[str, dict[str, Any]]:
    """Return the outcomes of one and of two replicas."""
    programs = {
        str(replicas): PROGRAM.replace("REPLICAS", str(replicas)).replace("LOSS", LOSSES[name])
        for replicas in (1, 2)
    }
    return plainly(programs, "tensorflow", "keras")


@pytest.mark.parametrize("name", ["mean", pytest.param("sum", marks=pytest.mark.full)])
def test_two_replicas_of_a_rank_give_results_of_one(name: str) -> None:
    """The rows of the last batch do not divide; the sum over a batch needs whole batches."""
    one, two = outcomes(name).values()
    for (loss, near, predicted), (loss_2, near_2, predicted_2) in zip(
        one["seen"], two["seen"], strict=True
    ):
        assert near == near_2
        np.testing.assert_allclose(loss_2, loss, rtol=1e-5)
        np.testing.assert_allclose(predicted_2, predicted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(two["total"], one["total"], rtol=1e-5)
    for key in ("gradients", "weights"):
        for a, b in zip(two[key], one[key], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
