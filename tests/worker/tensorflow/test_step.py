"""Steps on a rank with several replicas, as with several GPUs: two logical CPUs of one process.

MultiWorkerMirroredStrategy uses one CPU of each worker. MirroredStrategy replaces it here, because
the step needs only a strategy.
"""

from __future__ import annotations

import textwrap
from functools import cache
from itertools import product

import numpy as np
import pytest

from tests.references import plainly

PROGRAM = textwrap.dedent("""
    import numpy as np, tensorflow as tf, keras
    from nbdist.cells.step_program import compile_step
    from nbdist.records import StepOptions, StepRequest
    from nbdist.worker.data.batches import RankRows
    from nbdist.worker.tensorflow.step import MirroredStep

    replicas, precision = REPLICAS, PRECISION or None
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((5,)), keras.layers.Dense(4, "tanh", activity_regularizer="l2"),
            keras.layers.BatchNormalization(), keras.layers.Dense(3, activity_regularizer="l1")])
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        seen = keras.metrics.SparseCategoricalAccuracy()
    source = '''#
    x, y = batch
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(y, logits)
        loss += sum([tf.cast(part, loss.dtype) for part in model.losses])
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    seen.update_state(y, logits)
    {"loss": loss, "accuracy": seen.result()}
    '''
    program = compile_step(source, given=("batch",), carries=False)
    request = StepRequest(program=program, options=StepOptions(data="none"))

    def define(text):
        import linecache
        linecache.cache["<step>"] = (len(text), None, text.splitlines(True), "<step>")
        scope = {}
        exec(compile(text, "<step>", "exec"), globals(), scope)
        return scope["step"]

    x = np.random.default_rng(0).normal(size=(23, 5)).astype("float32")
    y = (x.sum(1) > 0).astype("int32") + (x[:, 0] > 1)
    rank_rows = RankRows(rank=0, ranks=1, replicas=replicas)
    step = MirroredStep(request, define, globals(), strategy, precision)
    values = []
    for start in range(0, 23, 8):
        rows = slice(start, min(start + 8, 23))
        part = lambda p, rows=rows: ((x[rows][p], y[rows][p]),)
        batch = rank_rows.batch(rows.stop - rows.start, part)
        if start == 0 and not precision:
            found = step.check(batch)
            assert not found.causes, found
        result = step.read(step.step(batch))
        assert result.finite
        values.append([result.values["loss"], result.values["accuracy"]])
    step.finish()
    outcome = {"values": values, "weights": [w.tolist() for w in model.get_weights()]}
""")


PRECISIONS = ("", "float16")


@cache
def outcomes() -> dict[str, dict[str, list[list[float]]]]:
    """Return the program's outcomes in a separate process, for each number and precision."""
    programs = {
        f"{replicas} {precision}": PROGRAM.replace("REPLICAS", str(replicas)).replace(
            "PRECISION", repr(precision)
        )
        for replicas, precision in product((1, 2), PRECISIONS)
    }
    return plainly(programs, "tensorflow", "keras")


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_replicas_of_a_rank_give_results_of_one(precision: str) -> None:
    one, two = outcomes()[f"1 {precision}"], outcomes()[f"2 {precision}"]
    tolerances = {"rtol": 1e-5, "atol": 1e-6} if not precision else {"rtol": 0.05, "atol": 0.02}
    np.testing.assert_allclose(two["values"], one["values"], **tolerances)
    for a, b in zip(two["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(a, b, **tolerances)
