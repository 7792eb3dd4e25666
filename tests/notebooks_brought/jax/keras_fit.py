# framework: jax
# compare: history.history["loss"]; history.history["val_loss"]; scores; model.get_weights(); probs

# %% [markdown]
# # Keras on JAX: `compile` and `fit`

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)
print("backend:", keras.backend.backend())

# %% [markdown]
# ## Data
#
# A ring inside a ring. The training set has 230 samples, so the last batch is small.

# %%
num_classes = 2
input_shape = (2,)


def rings(n):
    label = np.random.randint(0, 2, n)
    radius = 1.0 + label + 0.15 * np.random.randn(n)
    angle = np.random.uniform(0, 2 * np.pi, n)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype("float32"), keras.utils.to_categorical(label, num_classes)


x_train, y_train = rings(230)
x_val, y_val = rings(64)
x_test, y_test = rings(64)

# %% Model
model = keras.Sequential(
    [
        layers.Input(shape=input_shape),
        layers.Dense(32, activation="relu"),
        layers.Dense(16, activation="relu"),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
model.summary()

# %% Train
batch_size = 32
epochs = 5

model.compile(
    loss=keras.losses.CategoricalCrossentropy(),
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    metrics=[keras.metrics.CategoricalAccuracy(name="acc")],
)

history = model.fit(
    x_train,
    y_train,
    batch_size=batch_size,
    epochs=epochs,
    validation_data=(x_val, y_val),
    verbose=2,
)

# %% Evaluate
scores = model.evaluate(x_test, y_test, verbose=0)
print(f"Test loss {scores[0]:.4f}, accuracy {scores[1]:.3f}")

probs = model.predict(x_test[:10], verbose=0)
probs.argmax(axis=1)
