# framework: tensorflow
# compare: history; model.get_weights(); model(x[:8]).numpy()

# %% [markdown]
# # A `train` function, `tf.function`, and extra losses from layers
#
# Layers may add their own terms with `add_loss`. `model.losses` lists them after a forward pass.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, regularizers

# %%
keras.utils.set_random_seed(21)


class ActivityRegularizationLayer(layers.Layer):
    def __init__(self, rate=1e-4, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * tf.reduce_sum(tf.square(inputs)))
        return inputs


inputs = keras.Input(shape=(8,))
x_ = layers.Dense(16, activation="relu", kernel_regularizer=regularizers.l2(1e-3))(inputs)
x_ = ActivityRegularizationLayer()(x_)
outputs = layers.Dense(1)(x_)
model = keras.Model(inputs, outputs)

# %%
rng = np.random.default_rng(21)
x = rng.normal(size=(256, 8)).astype(np.float32)
y = np.sum(x[:, :4], axis=1, keepdims=True) - np.maximum(x[:, 4:5], 0)

ds = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

# %%
lr_schedule = keras.optimizers.schedules.ExponentialDecay(
    initial_learning_rate=0.05, decay_steps=4, decay_rate=0.9
)
optimizer = keras.optimizers.Adam(learning_rate=lr_schedule)
mse = keras.losses.MeanSquaredError()
mean_loss = keras.metrics.Mean()
mean_extra = keras.metrics.Mean()


# %%
@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        pred = model(x, training=True)
        loss = mse(y, pred)
        # Add any extra losses created during the forward pass.
        extra = sum(model.losses)
        loss_value = loss + extra
    grads = tape.gradient(loss_value, model.trainable_variables)
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    mean_loss.update_state(loss)
    mean_extra.update_state(extra)


# %%
def train(model, ds, epochs):
    history = {"loss": [], "extra": []}
    for epoch in range(epochs):
        mean_loss.reset_state()
        mean_extra.reset_state()
        for x, y in ds:
            train_step(x, y)
        history["loss"].append(float(mean_loss.result()))
        history["extra"].append(float(mean_extra.result()))
        print(f"epoch {epoch + 1}/{epochs}", {k: round(v[-1], 4) for k, v in history.items()})
    return history


history = train(model, ds, epochs=3)

# %% The learning rate went down
print(float(optimizer.learning_rate))
