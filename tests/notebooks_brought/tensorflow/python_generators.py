# framework: tensorflow
# compare: history.history["loss"]; history2.history["loss"]; model.get_weights(); loss

# %% [markdown]
# # Data that do not fit in memory: generators
#
# First an endless generator in `fit`, then the same data through `Dataset.from_generator`,
# then a `PyDataset` for the test.

# %%
import math

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(8)

# %% Pretend that this is on disk
rng = np.random.default_rng(8)
x_all = rng.normal(size=(256, 12)).astype("float32")
y_all = (x_all[:, :1] * x_all[:, 1:2] > 0).astype("float32")
x_train, y_train = x_all[:192], y_all[:192]
x_test, y_test = x_all[192:], y_all[192:]


# %%
def data_generator(x, y, batch_size):
    """Yields batches forever, in a new order in each epoch."""
    order_rng = np.random.default_rng(0)
    while True:
        order = order_rng.permutation(len(x))
        for start in range(0, len(x), batch_size):
            idx = order[start : start + batch_size]
            yield x[idx], y[idx]


batch_size = 24
train_gen = data_generator(x_train, y_train, batch_size)
steps_per_epoch = len(x_train) // batch_size

# %%
model = keras.Sequential(
    [
        keras.Input((12,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="rmsprop", loss="binary_crossentropy", metrics=["accuracy"])
history = model.fit(train_gen, steps_per_epoch=steps_per_epoch, epochs=2, verbose=2)

# %% [markdown]
# ## `Dataset.from_generator`


# %%
def row_generator():
    for features, label in zip(x_train, y_train):
        yield features, label


train_ds = tf.data.Dataset.from_generator(
    row_generator,
    output_signature=(
        tf.TensorSpec(shape=(12,), dtype=tf.float32),
        tf.TensorSpec(shape=(1,), dtype=tf.float32),
    ),
)
train_ds = train_ds.batch(batch_size).prefetch(1)

history2 = model.fit(train_ds, epochs=2, verbose=2)


# %% A keras.utils.PyDataset
class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y
        self.batch_size = batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, idx):
        low = idx * self.batch_size
        high = min(low + self.batch_size, len(self.x))
        return self.x[low:high], self.y[low:high]


# %%
loss, acc = model.evaluate(Batches(x_test, y_test, 16), verbose=0)
print(f"test loss {loss:.3f}, accuracy {acc:.3f}")
