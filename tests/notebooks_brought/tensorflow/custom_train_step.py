# framework: tensorflow
# compare: history.history; model.get_weights(); evaluation; model.predict(x[:16], verbose=0)

# %% [markdown]
# # Customize what happens in `fit()`
#
# Override `train_step` and `test_step` of the Model class and keep callbacks, progress bar and
# validation.

# %%
import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# %%
keras.utils.set_random_seed(17)

loss_tracker = keras.metrics.Mean(name="loss")
mae_metric = keras.metrics.MeanAbsoluteError(name="mae")


class CustomModel(keras.Model):
    def train_step(self, data):
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)  # Forward pass
            per_sample = keras.losses.mean_squared_error(y, y_pred)
            if sample_weight is not None:
                per_sample = per_sample * tf.cast(sample_weight, per_sample.dtype)
            loss = tf.reduce_mean(per_sample)

        # Compute gradients
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)

        # Update weights
        self.optimizer.apply(gradients, trainable_vars)

        # Compute our own metrics
        loss_tracker.update_state(loss)
        mae_metric.update_state(y, y_pred)
        return {"loss": loss_tracker.result(), "mae": mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        loss_tracker.update_state(tf.reduce_mean(keras.losses.mean_squared_error(y, y_pred)))
        mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        # Listed here, so that reset_states() is called at the start of each epoch
        return [loss_tracker, mae_metric]


# %%
inputs = keras.Input(shape=(16,))
h = layers.Dense(12, activation="gelu")(inputs)
outputs = layers.Dense(1)(h)
model = CustomModel(inputs, outputs)

# No loss and no metrics here
model.compile(optimizer=keras.optimizers.AdamW(learning_rate=0.01, weight_decay=0.004))

# %%
rng = np.random.default_rng(17)
x = rng.random((384, 16)).astype("float32")
y = x.sum(axis=1, keepdims=True) + x[:, :1] ** 2
sample_weight = np.where(y[:, 0] > 8, 2.0, 1.0)

history = model.fit(
    x[:320],
    y[:320],
    sample_weight=sample_weight[:320],
    batch_size=32,
    epochs=3,
    validation_data=(x[320:], y[320:]),
)

# %%
evaluation = model.evaluate(x[320:], y[320:], return_dict=True)
