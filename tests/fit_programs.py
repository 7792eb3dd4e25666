"""Cells that call Keras's `fit` the way tutorials do. Each assigns `outcome`.

The same text runs on workers and in one plain process. The batches of each cell are not divisible
by two or four replicas.
"""

from __future__ import annotations

import textwrap

PLAIN = """
def plain(value):
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return np.asarray(value, "float64").tolist()
outcome = plain(outcome)
"""
"""Code that converts `outcome` to JSON values."""

START = """
import math
import keras, numpy as np, tensorflow as tf
from keras import layers, ops
keras.utils.set_random_seed(3)
draw = np.random.default_rng(0)
x = draw.normal(size=(71, 8)).astype("float32")
y = x.sum(1, keepdims=True) + 1
labels = draw.integers(0, 3, 71)
def dense(*between, outputs=1, activation=None):
    return keras.Sequential([
        keras.Input((8,)), layers.Dense(16, "tanh"), *between,
        layers.Dense(outputs, activation)])
"""
AFTER = """
outcome = {"history": history.history, "weights": model.get_weights()}
"""


def program(body: str, *, after: str = AFTER) -> str:
    return START + textwrap.dedent(body) + after + PLAIN


EVERYTHING_KERAS_HAS = program(
    """
    model = dense(layers.BatchNormalization(), layers.Dropout(0.3),
                  layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2"))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), "mse",
                  metrics=["mae", keras.metrics.RootMeanSquaredError()], weighted_metrics=["mape"])
    history = model.fit(x, y, batch_size=33, epochs=3, validation_split=0.2, verbose=0,
                        sample_weight=np.linspace(0.5, 2, 71).astype("float32"))
    """,
    after="""
outcome = {
    "history": history.history,
    "weights": model.get_weights(),
    "evaluate": model.evaluate(x, y, batch_size=10, verbose=0),
    "predict": model.predict(x, verbose=0),
    "predict_on_batch": model.predict_on_batch(x[:4]),
    "train_on_batch": [model.train_on_batch(x[i:i + 9], y[i:i + 9]) for i in range(3)],
    "test_on_batch": model.test_on_batch(x[:5], y[:5]),
}
""",
)

FITS: dict[str, str] = {
    "everything": EVERYTHING_KERAS_HAS,
    "global_clipnorm and class weights": program(
        """
        model = dense(outputs=3, activation="softmax")
        model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.05),
                      "sparse_categorical_crossentropy",
                      metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
        history = model.fit(x, labels, batch_size=33, epochs=2, verbose=0,
                            class_weight={0: 1.0, 1: 2.0, 2: 0.5})
        """
    ),
    "a shuffled data set": program(
        """
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(71).batch(16).prefetch(2)
        model = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(data, epochs=3, validation_data=data.take(2), verbose=0)
        """
    ),
    "maps of samples": program(
        """
        calls = []
        def counted(rows):
            calls.append(len(rows))
            return rows
        def doubled(x, y):  # TensorFlow knows of no effect
            x = tf.numpy_function(counted, [x], tf.float32, stateful=False)
            return tf.reshape(x, [8]) * 2 + 1, y
        pairs = tf.data.Dataset.from_tensor_slices((x, y))
        data = pairs.map(doubled, tf.data.AUTOTUNE).shuffle(71, seed=4).batch(16).prefetch(2)
        model = dense(layers.BatchNormalization(), layers.Dropout(0.3))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        next(iter(data))  # counts for the order of the epochs
        calls.clear()
        history = model.fit(data, epochs=3, verbose=0,
                            validation_data=pairs.map(doubled).batch(33).cache())
        fitted = len(calls)
        predictions = model.predict(pairs.map(doubled).batch(33), verbose=0)
        scores = model.predict(data, verbose=0, steps=3)
        """,
        after=AFTER + "outcome['predictions'] = predictions\noutcome['scores'] = scores\n",
    ),
    "drop_remainder and repeat": program(
        """
        data = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(71, seed=3).repeat()
        data = data.batch(15, drop_remainder=True)
        model = dense(layers.Dropout(0.2))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(data, steps_per_epoch=5, epochs=2, verbose=0)
        """
    ),
    "a generator": program(
        """
        def batches():
            own = np.random.default_rng(1)
            while True:
                rows = own.normal(size=(15, 8)).astype("float32")
                yield rows, rows.sum(1, keepdims=True)
        model = dense()
        model.compile("adam", "mse")
        history = model.fit(batches(), steps_per_epoch=7, epochs=2, verbose=0)
        """
    ),
    "steps_per_execution of a PyDataset": program(
        """
        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return math.ceil(len(x) / 16)
            def __getitem__(self, i):
                return x[i * 16:(i + 1) * 16], y[i * 16:(i + 1) * 16]
        model = dense()
        model.compile("adam", "mse", steps_per_execution=3)
        history = model.fit(Batches(), epochs=2, verbose=0, shuffle=False)
        """,
        after=AFTER
        + """
outcome["predict"] = model.predict(Batches(), verbose=0)
outcome["evaluate"] = model.evaluate(Batches(), verbose=0)
""",
    ),
    "embeddings, a mask and a recurrent layer": program(
        """
        words = draw.integers(0, 20, size=(71, 9))
        model = keras.Sequential([
            layers.Embedding(20, 8, mask_zero=True),
            layers.LSTM(8, dropout=0.2, recurrent_dropout=0.1), layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.Adam(global_clipnorm=0.1), "binary_crossentropy",
                      metrics=["accuracy", keras.metrics.AUC(),
                               keras.metrics.F1Score(threshold=0.5)])
        history = model.fit(words, (labels[:, None] > 0).astype("float32"), batch_size=16,
                            epochs=2, verbose=0)
        """
    ),
    "embeddings of positions": program(
        """
        class Positions(layers.Layer):
            def __init__(self):
                super().__init__()
                self.words, self.places = layers.Embedding(30, 8), layers.Embedding(9, 8)
            def call(self, words):
                return self.words(words) + self.places(ops.arange(ops.shape(words)[-1]))
        words = draw.integers(0, 30, size=(71, 9))
        model = keras.Sequential([
            keras.Input((None,)), Positions(), layers.GlobalAveragePooling1D(),
            layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.05),
                      "sparse_categorical_crossentropy")
        rates = []
        class Rate(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                rates.append(float(self.model.optimizer.learning_rate))
                self.model.optimizer.learning_rate = 0.01 / (batch + 1)
        history = model.fit(words, labels, batch_size=16, epochs=2, verbose=0, callbacks=[Rate()])
        """,
        after=AFTER + 'outcome["rates"] = rates\n',
    ),
    "augmented images": program(
        """
        images = draw.uniform(size=(50, 8, 8, 3)).astype("float32")
        model = keras.Sequential([
            keras.Input((8, 8, 3)), layers.RandomFlip("horizontal"), layers.RandomRotation(0.1),
            layers.RandomZoom(0.1), layers.GaussianNoise(0.1),
            layers.Conv2D(4, 3, activation="relu"), layers.SpatialDropout2D(0.2),
            layers.GlobalAveragePooling2D(), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
        history = model.fit(images, labels[:50], batch_size=16, epochs=2, verbose=0,
                            validation_data=(images[:20], labels[:20]))
        """
    ),
    "a sum": program(
        """
        model = dense()
        model.compile(keras.optimizers.SGD(1e-4), keras.losses.MeanSquaredError(reduction="sum"))
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        """
    ),
    "several outputs": program(
        """
        a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
        both = layers.concatenate([layers.Dense(8, "relu")(a), layers.Dense(4, "relu")(b)])
        outputs = {"o1": layers.Dense(1, name="o1")(both),
                   "o2": layers.Dense(3, name="o2", activation="softmax")(both)}
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile("sgd", loss={"o1": "mse", "o2": "sparse_categorical_crossentropy"},
                      loss_weights={"o1": 0.5, "o2": 1.0},
                      metrics={"o1": ["mae"], "o2": ["accuracy"]})
        inputs = {"a": x, "b": x[:, :4]}
        history = model.fit(inputs, {"o1": y, "o2": labels}, batch_size=10, epochs=2, verbose=0,
                            validation_split=0.2)
        """,
        after=AFTER + 'outcome["predict"] = model.predict(inputs, verbose=0)\n',
    ),
    "accumulated gradients and an average of weights": program(
        """
        model = dense()
        model.compile(keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3,
                                             gradient_accumulation_steps=2), "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0)])
        """
    ),
    "eager": program(
        """
        model = dense(layers.Dropout(0.1))
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True, metrics=["mae"])
        history = model.fit(x, y, batch_size=30, epochs=2, verbose=0)
        """
    ),
    "a train_step of one's own": program(
        """
        class Custom(keras.Model):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(y=y, y_pred=y_pred)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
                for metric in self.metrics:
                    if metric.name == "loss":
                        metric.update_state(loss)
                    else:
                        metric.update_state(y, y_pred)
                return {m.name: m.result() for m in self.metrics}
            def test_step(self, data):
                x, y = data
                return {"loss": self.compute_loss(y=y, y_pred=self(x, training=False))}
        inputs = keras.Input((8,))
        model = Custom(inputs, layers.Dense(1)(inputs))
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        history = model.fit(x, y, epochs=3, verbose=0)
        """,
        after=AFTER + 'outcome["evaluate"] = model.evaluate(x[:32], y[:32], verbose=0)\n',
    ),
    "a train_step compiled with tf.function": program(
        """
        class Compiled(keras.Model):
            def __init__(self):
                super().__init__()
                self.embedding, self.out = layers.Embedding(3, 8), layers.Dense(3)
            def call(self, inputs):
                return self.out(self.embedding(inputs))
            @tf.function
            def train_step(self, data):
                tokens, truth = data
                with tf.GradientTape() as tape:
                    loss = self.loss(truth, self(tokens, training=True))
                weights = self.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                return {"loss": loss}
        model = Compiled()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(labels, labels, batch_size=16, epochs=2, verbose=0)
        """
    ),
    "a subclassed model": program(
        """
        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden, self.drop = layers.Dense(16, "relu"), layers.Dropout(0.2)
                self.norm, self.out = layers.BatchNormalization(), layers.Dense(1)
            def call(self, inputs, training=False):
                return self.out(self.norm(self.drop(self.hidden(inputs), training=training),
                                          training=training))
        model = Net()
        model.compile("sgd", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=30, epochs=2, verbose=0)
        """,
        after=AFTER
        + """
outcome["predict"] = model.predict(x, verbose=0)
outcome["evaluate"] = model.evaluate(x, y, verbose=0)
""",
    ),
    "values computed from a metric's result": program(
        """
        class Language(keras.Model):
            def __init__(self):
                super().__init__()
                self.out, self.tracker = layers.Dense(1), keras.metrics.Mean(name="loss")
            def call(self, inputs):
                return self.out(inputs)
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = ops.mean(ops.square(self(x) - y))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                self.tracker.update_state(loss)
                return {"loss": self.tracker.result(),
                        "perplexity": ops.exp(self.tracker.result() / 10)}
            @property
            def metrics(self):
                return [self.tracker]
        model = Language()
        model.compile("sgd")
        history = model.fit(x, y, batch_size=30, epochs=2, verbose=0)
        """
    ),
    "a GAN without call()": program(
        """
        class GAN(keras.Model):
            def __init__(self, discriminator, generator):
                super().__init__()
                self.discriminator, self.generator = discriminator, generator
                self.d_tracker = keras.metrics.Mean(name="d_loss")
                self.g_tracker = keras.metrics.Mean(name="g_loss")
                self.seeds = keras.random.SeedGenerator(1337)
            def compile(self, d_optimizer, g_optimizer, loss_fn):
                super().compile()
                self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
                self.loss_fn = loss_fn
            @property
            def metrics(self):
                return [self.d_tracker, self.g_tracker]
            def train_step(self, real):
                size = ops.shape(real)[0]
                made = self.generator(keras.random.normal((size, 4), seed=self.seeds))
                both = ops.concatenate([made, real], axis=0)
                truth = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
                with tf.GradientTape() as tape:
                    d_loss = self.loss_fn(truth, self.discriminator(both))
                weights = self.discriminator.trainable_weights
                self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
                noise = keras.random.normal((size, 4), seed=self.seeds)
                with tf.GradientTape() as tape:
                    g_loss = self.loss_fn(ops.zeros((size, 1)),
                                          self.discriminator(self.generator(noise)))
                weights = self.generator.trainable_weights
                self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
                self.d_tracker.update_state(d_loss)
                self.g_tracker.update_state(g_loss)
                return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}
        discriminator = keras.Sequential([
            keras.Input((8,)), layers.Dense(8), layers.LeakyReLU(), layers.Dense(1)])
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(8)])
        model = GAN(discriminator, generator)
        model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01),
                      keras.losses.BinaryCrossentropy(from_logits=True))
        history = model.fit(x, epochs=2, batch_size=32, verbose=0)
        """
    ),
    "a train_step that uses layers without call()": program(
        """
        class Parts(keras.Model):
            def __init__(self):
                super().__init__()
                self.encoder, self.decoder = layers.Dense(2), layers.Dense(8)
            def call(self, x):
                raise ValueError("the model has no single output")
            def train_step(self, x):
                with tf.GradientTape() as tape:
                    loss = ops.mean(ops.square(self.decoder(self.encoder(x)) - x))
                weights = self.trainable_weights
                self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                return {"loss": loss}
        model = Parts()
        model.compile(keras.optimizers.Adam(0.01))
        history = model.fit(x, epochs=2, batch_size=32, verbose=0)
        """
    ),
    "float64": program(
        """
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        model = dense(layers.BatchNormalization(), layers.Dropout(0.1))
        model.compile(keras.optimizers.SGD(0.1, clipvalue=0.01), "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        """,
        after=AFTER
        + """
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
""",
    ),
    "float16": program(
        """
        keras.config.set_dtype_policy("mixed_float16")
        model = keras.Sequential([
            keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(1, dtype="float32")])
        # No gradient overflows at this scale on one device, whose sums are larger.
        model.compile(keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=256.0), "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        """,
        after=AFTER + 'keras.config.set_dtype_policy("float32")\n',
    ),
    "noise for weights with as many rows as a replica": program(
        """
        class Noisy(layers.Layer):
            def build(self, shape):
                self.kernel = self.add_weight(shape=(8, 3), initializer="ones")
                self.seeds = keras.random.SeedGenerator(5)
            def call(self, inputs):
                noise = tf.random.stateless_normal(self.kernel.shape, [1, 2])
                rows = keras.random.normal(ops.shape(inputs), seed=self.seeds)
                return ops.matmul(inputs + rows, self.kernel * (1 + noise))
        model = keras.Sequential([Noisy(), layers.Dropout(0.3), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
        history = model.fit(data, epochs=2, verbose=0)
        """
    ),
    "a session that is cleared": program(
        """
        keras.backend.clear_session()
        tf.keras.utils.set_random_seed(3)
        model = dense()
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=16, verbose=0)
        tf.keras.backend.clear_session()
        keras.utils.clear_session()
        keras.utils.set_random_seed(4)
        model = dense(layers.Dropout(0.5))
        model.compile("sgd", "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        """
    ),
    "a model that takes its shape from the data": program(
        """
        model = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), lambda y, p: ops.mean(ops.square(y - p)))
        history = model.fit(x[:64], y[:64], batch_size=16, epochs=2, verbose=0)
        """
    ),
    "a count as a metric, and the best loss of an own step": program(
        """
        class Count(keras.metrics.Metric):
            def __init__(self, name="count"):
                super().__init__(name=name)
                self.number = self.add_weight(name="number", initializer="zeros", dtype="int32")
            def update_state(self, y, p, sample_weight=None):
                self.number.assign_add(tf.size(y))
            def result(self):
                return self.number
            def reset_state(self):
                self.number.assign(7)
        class Best(keras.metrics.Metric):
            def __init__(self, name="best"):
                super().__init__(name=name)
                self.least = self.add_weight(
                    name="least", initializer=keras.initializers.Constant(1e3))
            def update_state(self, loss):
                self.least.assign(tf.minimum(self.least, loss))
            def result(self):
                return self.least
            def reset_state(self):
                self.least.assign(1e3)
        class Tracks(keras.Model):
            def __init__(self):
                super().__init__()
                self.out, self.best = layers.Dense(1), Best()
            def call(self, inputs):
                return self.out(inputs)
            @property
            def metrics(self):
                return [*super().metrics, self.best]
            def train_step(self, data):
                logs = super().train_step(data)
                self.best.update_state(logs["loss"])
                return {**logs, "best": self.best.result()}
        model = Tracks()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Count()])
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        """
    ),
    "predictions that draw random numbers": program(
        """
        class Sampling(layers.Layer):
            def __init__(self):
                super().__init__()
                self.seeds = keras.random.SeedGenerator(7)
            def call(self, mean):
                return mean + keras.random.normal(ops.shape(mean), seed=self.seeds)
        inputs = keras.Input((8,))
        kept = layers.Dropout(0.5)(layers.Dense(16)(inputs), training=True)
        dropout = keras.Model(inputs, layers.Dense(2)(kept))
        sampling = keras.Sequential([keras.Input((8,)), layers.Dense(4), Sampling()])
        same = keras.Sequential([keras.Input((8,)), layers.GaussianNoise(0.1)])
        """,
        after="""
outcome = {str(n): model.predict(x, batch_size=33, verbose=0)
           for n, model in enumerate((dropout, dropout, sampling, sampling, same))}
""",
    ),
}
