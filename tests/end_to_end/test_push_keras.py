"""Push of Keras objects from a notebook that uses Keras. The notebook is its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.processes

NOTEBOOK = """
import json, sys
import keras, numpy as np
from keras import layers
import nbdist

framework = sys.argv[1]
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = x.sum(1, keepdims=True)

class Double(layers.Layer):
    def call(self, x):
        return 2 * x

def squares(truth, predicted):
    return keras.ops.mean(keras.ops.square(truth - predicted), axis=-1)

class Pair(keras.Model):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

class OwnCompile(keras.Model):
    def compile(self, first, second):
        super().compile(first)
        self.other = second
    def call(self, x):
        return x

model = keras.Sequential([
    keras.Input((8,)), layers.Dense(4, "tanh"), Double(), layers.BatchNormalization(),
    layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), squares, metrics=[squares, "mae"])
fit = dict(epochs=2, batch_size=30, shuffle=False, verbose=0)
model.fit(x, y, **fit)
uncompiled = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
normalization = layers.Normalization()
normalization.adapt(x)
pair = Pair(uncompiled, uncompiled)
own = OwnCompile()
own.compile("sgd", "sgd")
refused = {"pair": pair, "own": own}
objects = dict(model=model, uncompiled=uncompiled, optimizer=optimizer,
               normalization=normalization, x=x, y=y, fit=fit)
if framework == "tensorflow":
    import tensorflow as tf
    refused["data"] = tf.data.Dataset.from_tensor_slices(x)
    objects["words"] = layers.TextVectorization(vocabulary=["a", "b"])

errors = {}
with nbdist.Cluster(hosts=2, framework=framework) as cluster:
    for name, value in refused.items():
        try:
            cluster.push({"x": x, name: value})
        except nbdist.TransferError as error:
            errors[name] = str(error)
    cluster.push(objects)
    cluster.run('''
before = model.predict(x, verbose=0), normalization(x), uncompiled.predict(x, verbose=0)
before = [np.asarray(value) for value in before]
steps, is_compiled = int(model.optimizer.iterations), uncompiled.compiled
history = model.fit(x, y, **fit).history
weights = model.get_weights()
uncompiled.compile(optimizer, "mse")
losses = uncompiled.fit(x, y, **fit).history["loss"]
words = np.asarray(words(["b", "c"])).tolist() if "words" in globals() else None
'''.replace("before =", "import numpy as np; before =", 1))
    names = ["before", "steps", "is_compiled", "history", "weights", "losses", "words"]
    pulled = cluster.pull(names)

before = [model.predict(x, verbose=0), np.asarray(normalization(x)),
          uncompiled.predict(x, verbose=0)]
steps = int(model.optimizer.iterations)
history = model.fit(x, y, **fit).history
uncompiled.compile(optimizer, "mse")
losses = uncompiled.fit(x, y, **fit).history["loss"]
for found in pulled.values():
    for one, other in zip(found["before"] + found["weights"], before + model.get_weights(),
                          strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert found["steps"] == steps == 6, (found["steps"], steps)
    assert not found["is_compiled"]
    for name, values in history.items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-5)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    assert found["words"] in (None, [[3], [1]]), found["words"]
print(json.dumps(errors))
"""


def errors_of(framework: str) -> dict[str, Any]:
    """Run the notebook, and return the errors of refused objects by name."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, framework],
        env={**os.environ, "KERAS_BACKEND": framework, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return errors


@pytest.mark.parametrize("framework", ["tensorflow", pytest.param("jax", marks=pytest.mark.full)])
def test_pushed_keras_objects_train_as_in_the_notebook(framework: str) -> None:
    errors = errors_of(framework)
    assert errors["pair"].startswith("pair (Pair) contains a Pair that Keras cannot create")
    assert "push the arrays of its get_weights()" in errors["pair"]
    assert errors["own"].startswith("own (OwnCompile) contains a compiled OwnCompile with a comp")
    if framework == "tensorflow":
        assert "data (_TensorSliceDataset) is a tf.data.Dataset" in errors["data"]
        assert "create it in a %%dist_run cell" in errors["data"]
