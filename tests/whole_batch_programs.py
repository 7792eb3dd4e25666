"""Cells that call Keras's `fit` for steps in which every replica must compute all rows."""

from __future__ import annotations

from tests.fit_programs import AFTER, program

WHOLE: dict[str, tuple[str, str]] = {
    "a loss that is no mean over rows": (
        "Sequential computes a different `gradient 0`",
        program(
            """
            def rmse(y, p):
                return ops.sqrt(ops.mean(ops.square(y - p)))
            model = dense(layers.Dropout(0.1))
            model.compile(keras.optimizers.SGD(0.01), rmse, metrics=[rmse])
            history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            """
        ),
    ),
    "a loss that a layer adds": (
        "Sequential computes a different `gradient 0`",
        program(
            """
            class Penalty(layers.Layer):
                def call(self, values):
                    self.add_loss(0.01 * ops.sum(ops.square(values)))
                    return values
            model = dense(Penalty())
            model.compile(keras.optimizers.SGD(0.01), "mse")
            history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:30], y[:30]),
                                verbose=0)
            """
        ),
    ),
    "rows that are compared with each other": (
        "Contrastive computes a different `gradient 0`",
        program(
            """
            class Contrastive(keras.Model):
                def __init__(self):
                    super().__init__()
                    self.encoder = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])
                    self.tracker = keras.metrics.Mean(name="contrast")
                def call(self, values):
                    return self.encoder(values)
                def train_step(self, data):
                    with tf.GradientTape() as tape:
                        z = ops.normalize(self(data, training=True))
                        near = ops.matmul(z, ops.transpose(z)) / 0.1
                        own = ops.arange(ops.shape(z)[0])
                        loss = ops.mean(keras.losses.sparse_categorical_crossentropy(
                            own, near, from_logits=True))
                    gradients = tape.gradient(loss, self.trainable_variables)
                    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                    self.tracker.update_state(loss)
                    return {"contrast": self.tracker.result()}
                @property
                def metrics(self):
                    return [self.tracker]
            model = Contrastive()
            model.compile(keras.optimizers.SGD(0.1))
            history = model.fit(x, batch_size=16, epochs=2, verbose=0)
            """,
            after=AFTER + 'outcome["predict"] = model.predict(x, verbose=0)\n',
        ),
    ),
    "triplets, of which call() cannot take the first alone": (
        "Siamese computes a different `gradient 0`",
        program(
            """
            net = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(4)])
            class Siamese(keras.Model):
                def __init__(self, net):
                    super().__init__()
                    self.net, self.tracker = net, keras.metrics.Mean(name="loss")
                def call(self, inputs):
                    anchor, near, far = [self.net(rows) for rows in inputs]
                    return ops.sum((anchor - near) ** 2, -1), ops.sum((anchor - far) ** 2, -1)
                def _loss(self, data):
                    near, far = self(data)
                    return ops.maximum(near - far + 0.5, 0.0)
                def train_step(self, data):
                    with tf.GradientTape() as tape:
                        loss = self._loss(data)
                    weights = self.net.trainable_weights
                    self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
                    self.tracker.update_state(loss)
                    return {"loss": self.tracker.result()}
                def test_step(self, data):
                    self.tracker.update_state(self._loss(data))
                    return {"loss": self.tracker.result()}
                @property
                def metrics(self):
                    return [self.tracker]
            model = Siamese(net)
            model.compile(keras.optimizers.SGD(0.001), weighted_metrics=[])
            data = tf.data.Dataset.from_tensor_slices((x, x[::-1], x * 2)).batch(16)
            history = model.fit(data, epochs=2, validation_data=data.take(2), verbose=0)
            """,
            after='outcome = {"history": history.history, "weights": net.get_weights()}\n',
        ),
    ),
    "statistics of the batch in a variable": (
        "Sequential computes a different `variable",
        program(
            """
            class Statistics(layers.Layer):
                def build(self, shape):
                    self.spread = self.add_weight(shape=(shape[-1],), trainable=False)
                def call(self, values):
                    self.spread.assign(0.9 * self.spread + 0.1 * ops.var(values, axis=0))
                    return values
            model = dense(Statistics())
            model.compile(keras.optimizers.SGD(0.01), "mse")
            history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            """
        ),
    ),
    "a model of the batch's mean within a model": (
        "Sequential computes a different",
        program(
            """
            inputs = keras.Input((8,))
            centered = keras.Model(inputs, inputs - ops.mean(inputs, axis=0))
            model = keras.Sequential([keras.Input((8,)), centered, layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
            history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            """,
            after=AFTER + 'outcome["predict"] = model.predict(x, verbose=0)\n',
        ),
    ),
    "a term that comes in the second epoch": (
        "Sequential computes a different `gradient 0`",
        program(
            """
            beta = keras.Variable(0.0, trainable=False)
            def annealed(y, p):
                return ops.mean(ops.square(y - p)) + beta * ops.sum(ops.square(p))
            class Anneal(keras.callbacks.Callback):
                def on_epoch_begin(self, epoch, logs=None):
                    beta.assign(0.01 * epoch)
            model = dense()
            model.compile(keras.optimizers.SGD(0.01), annealed)
            history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[Anneal()])
            """
        ),
    ),
    "parts of other numbers of rows": (
        "Pairs is given parts with different numbers of rows",
        program(
            """
            class Pairs(keras.Model):
                def __init__(self):
                    super().__init__()
                    self.out = layers.Dense(1)
                def call(self, inputs):
                    return self.out(inputs)
                def train_step(self, data):
                    (known, target), unknown = data
                    with tf.GradientTape() as tape:
                        loss = ops.mean(ops.square(self.out(known) - target))
                        loss += ops.mean(ops.square(self.out(unknown)))
                    gradients = tape.gradient(loss, self.trainable_variables)
                    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                    return {"loss": loss}
            model = Pairs()
            model(x[:1])
            model.compile(keras.optimizers.SGD(0.01))
            labelled = tf.data.Dataset.from_tensor_slices((x[:16], y[:16])).batch(4)
            unlabelled = tf.data.Dataset.from_tensor_slices(x[:48]).batch(12)
            history = model.fit(tf.data.Dataset.zip((labelled, unlabelled)), epochs=2, verbose=0)
            """
        ),
    ),
    "a recurrent layer that keeps its state": (
        "Sequential keeps a state for each row",
        program(
            """
            model = keras.Sequential([
                keras.Input(batch_shape=(16, 5, 3)), layers.LSTM(8, stateful=True),
                layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
            series = draw.normal(size=(64, 5, 3)).astype("float32")
            history = model.fit(series, series.sum((1, 2))[:, None], batch_size=16, epochs=2,
                                shuffle=False, verbose=0)
            """
        ),
    ),
    "a metric that is a minimum": (
        "Sequential computes a different `least`",
        program(
            """
            class Least(keras.metrics.Metric):
                def __init__(self, name="least"):
                    super().__init__(name=name)
                    self.least = self.add_weight(name="least", initializer="zeros")
                    self.batches = self.add_weight(name="batches", initializer="zeros")
                def update_state(self, y, p, sample_weight=None):
                    self.least.assign(tf.minimum(self.least, tf.reduce_min(tf.abs(y - p))))
                    self.batches.assign_add(1.0)
                def result(self):
                    return self.least + 10 * self.batches
                def reset_state(self):
                    self.least.assign(1e3)
                    self.batches.assign(0.0)
            model = dense()
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Least(), "mae"])
            history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
            """,
            after=AFTER + 'outcome["evaluate"] = model.evaluate(x, y, verbose=0)\n',
        ),
    ),
    "a label that is ignored in rows beyond those of a trial": (
        "Sequential computes a different `gradient 0`",
        program(
            """
            rows = draw.normal(size=(1024, 3)).astype("float32")
            classes = draw.integers(0, 4, 1024)
            classes[np.arange(1024) % 256 >= 200] = 255
            def ignoring(y, p):
                y = tf.cast(tf.reshape(y, [-1]), "int32")
                known = tf.cast(y != 255, "float32")
                each = keras.losses.sparse_categorical_crossentropy(
                    tf.where(y == 255, 0, y), p, from_logits=True)
                return tf.reduce_sum(each * known) / tf.reduce_sum(known)
            model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
            model.compile(keras.optimizers.SGD(0.5), ignoring)
            history = model.fit(rows, classes, batch_size=256, epochs=2, shuffle=False, verbose=0)
            """
        ),
    ),
    "a mask that begins in a later batch": (
        "first in batch 4",
        program(
            """
            labels[55:62] = -1
            def masked(y, p):
                known = tf.cast(y >= 0, "float32")
                each = ops.one_hot(tf.maximum(y, 0), 3) - p
                return tf.reduce_sum(known * tf.reduce_sum(each**2, -1)) / tf.reduce_sum(known)
            class Masks(keras.Model):
                def __init__(self):
                    super().__init__()
                    self.out = layers.Dense(3)
                def call(self, inputs):
                    return self.out(inputs)
                def train_step(self, data):
                    rows, known = data
                    with tf.GradientTape() as tape:
                        loss = masked(known, self(rows, training=True))
                    gradients = tape.gradient(loss, self.trainable_variables)
                    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                    return {"loss": loss}
            model = Masks()
            model.compile(keras.optimizers.SGD(0.05))
            history = model.fit(x, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)
            """
        ),
    ),
    "an update inside of a condition": (
        "Accumulating updates variables inside of a condition or loop of TensorFlow",
        program(
            """
            class Accumulating(keras.Model):
                def __init__(self, every, **options):
                    super().__init__(**options)
                    self.every, self.steps = every, tf.Variable(0, trainable=False)
                    self.sums = [tf.Variable(tf.zeros_like(v)) for v in self.trainable_variables]
                def train_step(self, data):
                    rows, targets = data
                    self.steps.assign_add(1)
                    with tf.GradientTape() as tape:
                        loss = self.compute_loss(y=targets, y_pred=self(rows, training=True))
                    gradients = tape.gradient(loss, self.trainable_variables)
                    for total, gradient in zip(self.sums, gradients):
                        total.assign_add(gradient)
                    tf.cond(tf.equal(self.steps, self.every), self.update, lambda: None)
                    for metric in self.metrics:
                        metric.update_state(loss)
                    return {metric.name: metric.result() for metric in self.metrics}
                def update(self):
                    self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables))
                    self.steps.assign(0)
                    for total in self.sums:
                        total.assign(tf.zeros_like(total))
            inputs = keras.Input((8,))
            hidden = layers.Dropout(0.2, seed=1)(layers.Dense(16, "tanh")(inputs))
            model = Accumulating(3, inputs=inputs, outputs=layers.Dense(1)(hidden))
            model.compile(keras.optimizers.Adam(0.05), "mse")
            history = model.fit(x, y, batch_size=16, epochs=3, verbose=0)
            """
        ),
    ),
}
"""Programs with the reason in the note that every replica computes all rows."""
