"""Six models, each written for one device, in plain Keras and in plain JAX.

No weight has a gradient that is always zero, such as a bias before batch normalization or the bias
of attention keys. Such a gradient would consist of rounding errors.

A training is a setup and a step, as texts that do not use nbdist. Tests run them as cells and by
hand (`tests/references.py`).
"""

from __future__ import annotations

import textwrap

from tests.references import Training

EPOCHS, BATCH = 2, 32
"""Settings for 77 samples. The last of 3 batches has 13, so the replicas cannot divide it."""

_DATA = textwrap.dedent("""
    import numpy as np
    from sklearn import datasets
    rows = 77

    def linear():
        x, y = datasets.load_diabetes(return_X_y=True)
        return 10 * x[:rows], y[:rows] / 100

    def mlp():
        x, y = datasets.load_digits(return_X_y=True)
        return x[:rows] / 16, y[:rows]

    def cnn():
        x, y = mlp()
        return x.reshape(-1, 8, 8, 1), y

    def lstm():
        '''Short lines of the descriptions of six data sets, as characters; 0 is padding.'''
        names = ["breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine"]
        lines = [(line.strip(), y) for y, name in enumerate(names)
                 for line in getattr(datasets, "load_" + name)().DESCR.splitlines()
                 if 2 < len(line.strip()) <= 28 and any(map(str.isalpha, line))]
        chosen = [lines[i] for i in np.random.default_rng(1).permutation(len(lines))[:rows]]
        x = np.zeros((rows, 28), "int32")
        for row, (line, _) in zip(x, chosen):
            row[: len(line)] = [ord(c) % 31 + 1 for c in line]
        return x, np.array([y for _, y in chosen])

    def transformer():
        x, y = lstm()
        return (x, np.broadcast_to(np.arange(28, dtype="int32"), x.shape)), y

    def recommender():
        '''How much of an item (a pixel) a user (one of 12 digits) has.'''
        x = datasets.load_digits().data
        rng = np.random.default_rng(2)
        users = rng.integers(12, size=rows).astype("int32")
        items = rng.integers(64, size=rows).astype("int32")
        return (users, items), x[users, items] / 16

    def cast(tree, dtype):
        if isinstance(tree, tuple):
            return tuple(cast(part, dtype) for part in tree)
        return tree.astype(dtype) if tree.dtype == "float64" else tree
""")

NAMES = ["recommender", "mlp", "cnn", "lstm", "transformer", "linear"]

TF_OPTIMIZERS = {
    "sgd": "keras.optimizers.SGD(0.05, momentum=0.9)",
    "adam": "keras.optimizers.Adam(0.01)",
    "adamw, clipped": "keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.05)",
}

JAX_OPTIMIZERS = {
    "sgd": "optax.sgd(0.05, momentum=0.9)",
    "adam": "optax.adam(0.01)",
    "adamw, clipped": "optax.chain(optax.clip_by_global_norm(0.05), "
    "optax.adamw(0.01, weight_decay=0.01))",
}

_TF_SETUP = textwrap.dedent("""
    import keras, tensorflow as tf
    keras.backend.set_floatx("DTYPE")
    keras.config.set_dtype_policy("DTYPE")
    keras.utils.set_random_seed(3)
    train = cast(NAME(), "DTYPE")
    layers = keras.layers
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    MODEL
    optimizer = OPTIMIZER
    optimizer.build(model.trainable_variables)
""")

_TF_MODELS = {
    "linear": """
        model = keras.Sequential([keras.Input((10,)), layers.Dense(1)])
        def loss_of(y, predicted):
            return tf.reduce_mean((predicted[:, 0] - y) ** 2)
    """,
    "mlp": """
        l2 = keras.regularizers.L2(1e-3)
        model = keras.Sequential([
            keras.Input((64,)),
            layers.Dense(24, activation="tanh", kernel_regularizer=l2, activity_regularizer=l2),
            layers.Dense(10)])
    """,
    "cnn": """
        model = keras.Sequential([
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
            layers.ReLU(), layers.Flatten(), layers.Dense(10)])
    """,
    "lstm": """
        model = keras.Sequential([
            keras.Input((28,), dtype="int32"),
            layers.Embedding(32, 6, mask_zero=True), layers.LSTM(8), layers.Dense(6)])
    """,
    "transformer": """
        tokens, places = keras.Input((28,), dtype="int32"), keras.Input((28,), dtype="int32")
        kept = tokens > 0
        x = layers.Embedding(32, 8)(tokens) + layers.Embedding(28, 8)(places)
        h = layers.MultiHeadAttention(2, 4, use_bias=False)(
            x, x, attention_mask=kept[:, None, :])
        x = layers.LayerNormalization()(x + h)
        h = layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
        x = layers.LayerNormalization()(x + h)
        x = layers.GlobalAveragePooling1D()(x, mask=kept)
        model = keras.Model([tokens, places], layers.Dense(6)(x))
    """,
    "recommender": """
        user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
        both = layers.Embedding(12, 4)(user) * layers.Embedding(64, 4)(item)
        bias = layers.Embedding(64, 1)(item)
        model = keras.Model([user, item], keras.ops.sum(both, -1) + bias[:, 0])
        def loss_of(y, predicted):
            return tf.reduce_mean((predicted - y) ** 2)
    """,
}

_TF_STEP = textwrap.dedent("""
    x, y = batch
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True)) + sum(model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    {"loss": loss}
""")

_TF_WEIGHTS = "[w.tolist() for w in model.get_weights()]"

_METRICS = textwrap.dedent("""
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    recent = keras.metrics.SparseCategoricalAccuracy()
    overlap = keras.metrics.MeanIoU(10)
    mean_loss = keras.metrics.Mean()
    weighted = keras.metrics.MeanSquaredError()
    metrics = accuracy, recent, overlap, mean_loss, weighted
""")

_METRICS_STEP = textwrap.dedent("""
    x, y = batch
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(y, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    accuracy.update_state(y, logits)
    recent.reset_state()
    of_batch = recent(y, logits)
    overlap.update_state(y, tf.argmax(logits, -1))
    mean_loss(loss)
    weighted.update_state(y[:, None], logits[:, :1], sample_weight=y)
    so_far = accuracy.result()
    mean = mean_loss.result()
    {"loss": loss, "of_batch": of_batch, "so_far": so_far, "mean": mean}
""")

_MASKS = textwrap.dedent("""
    model = keras.Sequential([
        keras.Input((28,), dtype="int32"), layers.Embedding(32, 6, mask_zero=True),
        layers.BatchNormalization(), layers.Dense(32)])
    optimizer = keras.optimizers.SGD(0.02)
    squares = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
""")
"""Classification of characters. Losses and moments skip the padding."""

_MASKS_STEP = textwrap.dedent("""
    x, y = batch
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(x, logits) + squares(y[:, None], logits[:, 0, :1], sample_weight=y + 1)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    {"loss": loss}
""")

_JAX_SETUP = textwrap.dedent("""
    import jax, jax.numpy as jnp, optax
    jax.config.update("jax_enable_x64", "DTYPE" == "float64")
    train = cast(NAME(), "DTYPE")
    draw = np.random.default_rng(3)
    decay = np.full((), 1e-4, "DTYPE")
    state = {}

    def normal(*shape):
        return (draw.normal(size=shape) / np.sqrt(shape[0])).astype("DTYPE")

    def zeros(*shape):
        return np.zeros(shape, "DTYPE")

    def cross_entropy(logits, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    MODEL
    def regularised(params, state, x, y, decay):
        loss, state = loss_of(params, state, x, y)
        return loss + decay * sum(jnp.vdot(p, p) for p in jax.tree.leaves(params)), state

    loss_and_gradient = jax.jit(jax.value_and_grad(regularised, has_aux=True))
    optimizer = OPTIMIZER
    slots = jax.jit(optimizer.init)(params)
    update, apply = jax.jit(optimizer.update), jax.jit(optax.apply_updates)
""")

_JAX_MODELS = {
    "linear": """
        params = {"w": normal(10), "b": zeros()}
        def loss_of(params, state, x, y):
            return ((x @ params["w"] + params["b"] - y) ** 2).mean(), state
    """,
    # Has a key that is split in every step, and a counter.
    "mlp": """
        params = {"w1": normal(64, 24), "b1": zeros(24), "w2": normal(24, 10), "b2": zeros(10)}
        state = {"key": jax.random.key(5), "steps": 0}
        def loss_of(params, state, x, y):
            key, noise = jax.random.split(state["key"])
            h = jnp.tanh(x @ params["w1"] + params["b1"])
            h = h + 0.01 * jax.random.normal(noise, (24,), h.dtype)
            logits = h @ params["w2"] + params["b2"]
            return cross_entropy(logits, y), {"key": key, "steps": state["steps"] + 1}
    """,
    # Has moments of the batch and their moving means.
    "cnn": """
        params = {"kernel": 3 * normal(3, 3, 1, 4), "gamma": 1 + zeros(4), "beta": zeros(4),
                  "w": normal(144, 10), "b": zeros(10)}
        state = {"mean": zeros(4), "variance": 1 + zeros(4)}
        def loss_of(params, state, x, y):
            h = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "VALID",
                                             dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean, variance = h.mean((0, 1, 2)), h.var((0, 1, 2))
            state = {"mean": 0.9 * state["mean"] + 0.1 * mean,
                     "variance": 0.9 * state["variance"] + 0.1 * variance}
            h = (h - mean) / jnp.sqrt(variance + 1e-3) * params["gamma"] + params["beta"]
            h = jax.nn.relu(h).reshape(len(x), -1)
            return cross_entropy(h @ params["w"] + params["b"], y), state
    """,
    "lstm": """
        params = {"embedding": 3 * normal(32, 6), "w": normal(6, 32), "u": normal(8, 32),
                  "b": zeros(32), "out": normal(8, 6)}
        def loss_of(params, state, x, y):
            def one(before, at):
                embedded, kept = at
                gates = embedded @ params["w"] + before[0] @ params["u"] + params["b"]
                i, f, g, o = jnp.split(gates, 4, -1)
                c = jax.nn.sigmoid(f) * before[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
                after = jax.nn.sigmoid(o) * jnp.tanh(c), c
                return jax.tree.map(lambda a, b: jnp.where(kept, a, b), after, before), None
            start = jnp.zeros((len(x), 8), params["w"].dtype)
            along = params["embedding"][x.T], (x > 0).T[..., None]
            (h, _), _ = jax.lax.scan(one, (start, start), along)
            return cross_entropy(h @ params["out"], y), state
    """,
    "transformer": """
        params = {"tokens": 3 * normal(32, 8), "places": normal(28, 8), "qkv": normal(8, 3, 2, 4),
                  "heads": normal(8, 8), "up": normal(8, 16), "down": normal(16, 8),
                  "gains": 1 + zeros(2, 8), "out": normal(8, 6)}
        def norm(x, gain):
            mean = x.mean(-1, keepdims=True)
            return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3) * gain
        def loss_of(params, state, x, y):
            tokens, places = x
            kept = tokens > 0
            x = params["tokens"][tokens] + params["places"][places]
            q, k, v = jnp.einsum("btd,dchk->cbhtk", x, params["qkv"])
            scores = jnp.where(kept[:, None, None], jnp.einsum("bhtk,bhsk->bhts", q, k) / 2, -1e9)
            h = jnp.einsum("bhts,bhsk->bthk", jax.nn.softmax(scores), v)
            x = norm(x + h.reshape(x.shape) @ params["heads"], params["gains"][0])
            x = norm(x + jax.nn.gelu(x @ params["up"]) @ params["down"], params["gains"][1])
            h = (x * kept[..., None]).sum(1) / kept.sum(1)[:, None]
            return cross_entropy(h @ params["out"], y), state
    """,
    "recommender": """
        params = {"users": normal(12, 4), "items": normal(64, 4), "bias": zeros(64)}
        def loss_of(params, state, x, y):
            users, items = x
            both = params["users"][users] * params["items"][items]
            return ((both.sum(-1) + params["bias"][items] - y) ** 2).mean(), state
    """,
}

_JAX_STEP = textwrap.dedent("""
    x, y = batch
    (loss, state), gradients = loss_and_gradient(params, state, x, y, decay)
    updates, slots = update(gradients, slots, params)
    params = apply(params, updates)
    {"loss": loss}
""")

_JAX_WEIGHTS = """[
    np.asarray(v).tolist()
    for v in jax.tree.leaves((params, {n: v for n, v in state.items() if n != "key"}))
]"""


def in_keras(name: str, optimizer: str, dtype: str) -> Training:
    setup = _setup(_TF_SETUP, _TF_MODELS[name], name, optimizer, dtype)
    return Training(setup, _TF_STEP, _TF_WEIGHTS, EPOCHS, BATCH)


def in_jax(name: str, optimizer: str, dtype: str) -> Training:
    setup = _setup(_JAX_SETUP, _JAX_MODELS[name], name, optimizer, dtype)
    return Training(setup, _JAX_STEP, _JAX_WEIGHTS, EPOCHS, BATCH)


def _setup(text: str, model: str, name: str, optimizer: str, dtype: str) -> str:
    for word, value in [
        ("MODEL", textwrap.dedent(model).strip() + "\n"),
        ("OPTIMIZER", optimizer),
        ("NAME", name),
        ("DTYPE", dtype),
    ]:
        text = text.replace(word, value)
    return _DATA + text


KERAS = {
    "metrics": Training(
        in_keras("mlp", TF_OPTIMIZERS["sgd"], "float64").setup + _METRICS,
        _METRICS_STEP,
        "[float(m.result()) for m in metrics]",
        EPOCHS,
        BATCH,
        ("loss", "of_batch", "so_far", "mean"),
    ),
    "masks": Training(
        in_keras("lstm", TF_OPTIMIZERS["sgd"], "float64").setup + _MASKS,
        _MASKS_STEP,
        _TF_WEIGHTS,
        EPOCHS,
        BATCH,
    ),
}
"""Keras trainings that compute metrics and masked losses over the batch."""
