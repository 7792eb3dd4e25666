"""Training with Keras 3, with the same texts as cells and as programs of one plain process."""

from __future__ import annotations

import textwrap
from functools import cache
from typing import Any

from tests.references import plainly

BETWEEN = "keras.layers.BatchNormalization(), keras.layers.Dropout(0.2),"
ADAM = "keras.optimizers.Adam(0.01)"
MODEL = textwrap.dedent(f"""
    import keras, numpy as np
    from sklearn.datasets import load_digits
    digits = load_digits()
    images = (digits.data[:961] / 16).astype("float32")
    labels = digits.target[:961]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, activation="tanh"),
                              {BETWEEN}
                              keras.layers.Dense(10)])
    model.compile(
        optimizer={ADAM},
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"])
""")
"""Model for 961 samples. The last of 11 batches has one, so the devices cannot divide it."""

FIT = textwrap.dedent("""
    history = model.fit(images, labels, batch_size=96, epochs=3,
                        validation_data=(images[:193], labels[:193]), verbose=0)
""")

OUTCOME = textwrap.dedent("""
    outcome = {
        "history": history.history,
        "evaluate": model.evaluate(images, labels, batch_size=96, verbose=0),
        "predict": np.asarray(model.predict(images[:97], batch_size=96, verbose=0)).tolist(),
        "weights": [w.tolist() for w in model.get_weights()],
    }
""")

FIXED = FIT.replace("verbose=0", "verbose=0, shuffle=False")
"""Epochs in the order of the data."""

NO_DROPOUT = MODEL.replace("keras.layers.Dropout(0.2),", "")
"""Model without dropout: its mask depends on a row's position, and parts change positions."""

SINGLE = textwrap.dedent("""
    losses = [model.train_on_batch(images[i : i + 97], labels[i : i + 97])[0] for i in range(3)]
    outcome["losses"] = [float(v) for v in losses]
    outcome["test"] = [float(v) for v in model.test_on_batch(images[:97], labels[:97])]
    outcome["predict_on_batch"] = model.predict_on_batch(images[:97]).tolist()
""")
"""Single batches after `OUTCOME`."""

TENSORFLOW = textwrap.dedent("""
    import tensorflow as tf
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(96)
""")

WHOLE = textwrap.dedent("""
    batches = [(images[i : i + 96], labels[i : i + 96]) for i in range(0, 961, 96)]
""")

DATASETS = {
    "tf.data": """
        import tensorflow as tf
        def own(ctx):
            data = tf.data.Dataset.from_tensor_slices((images, labels))
            data = data.shard(ctx.num_input_pipelines, ctx.input_pipeline_id)
            return data.batch(ctx.get_per_replica_batch_size(96))
    """,
    "PyDataset": """
        class Part(keras.utils.PyDataset):
            def __init__(self, x, y, size):
                super().__init__()
                self.x, self.y, self.size = x, y, size
            def __len__(self):
                return -(-len(self.x) // self.size)
            def __getitem__(self, i):
                rows = slice(i * self.size, (i + 1) * self.size)
                return self.x[rows], self.y[rows]
        def own(ctx):
            part = slice(ctx.input_pipeline_id, None, ctx.num_input_pipelines)
            return Part(images[part], labels[part], ctx.get_per_replica_batch_size(96))
    """,
    "generator": """
        def own(ctx):
            x, y = (a[ctx.input_pipeline_id :: ctx.num_input_pipelines] for a in (images, labels))
            size = ctx.get_per_replica_batch_size(96)
            for i in range(0, len(x), size):
                yield x[i : i + size], y[i : i + size]
    """,
}

REFERENCES = {
    "arrays": MODEL + FIT + OUTCOME + SINGLE,
    "without dropout": NO_DROPOUT + FIXED + OUTCOME,
}


def one_process(programs: dict[str, str]) -> dict[str, Any]:
    """Return the outcomes of programs under Keras on JAX, without nbdist."""
    return plainly(programs, "keras", "sklearn.datasets", KERAS_BACKEND="jax")


@cache
def references() -> dict[str, Any]:
    """Return the reference outcomes."""
    return one_process(REFERENCES)
