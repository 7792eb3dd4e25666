# framework: tensorflow
# compare: history.history; finder.lrs; finder.losses; model.get_weights(); rows; swa

# %% [markdown]
# # Own callbacks: find a learning rate, warm up, average the weights
# The finder changes the rate in each batch and stops by itself. Both runs append to one CSV file.

# %%
import csv
import tempfile
from pathlib import Path

import numpy as np
from tensorflow import keras

keras.utils.set_random_seed(14)
x = np.random.randn(200, 8).astype("float32")
y = np.tanh(x @ np.random.randn(8, 1)).astype("float32")


class LRFinder(keras.callbacks.Callback):
    def __init__(self, low=1e-4, high=1.0, steps=16):
        super().__init__()
        self.rates = np.geomspace(low, high, steps)
        self.lrs, self.losses, self.best, self.n = [], [], 1e9, 0

    def on_train_begin(self, logs=None):
        self.weights = self.model.get_weights()

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = float(self.rates[self.n])

    def on_train_batch_end(self, batch, logs=None):
        loss = logs["loss"]
        self.lrs.append(float(self.model.optimizer.learning_rate))
        self.losses.append(loss)
        self.best = min(self.best, loss)
        self.n += 1
        if self.n == len(self.rates) or loss > 4 * self.best:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.model.set_weights(self.weights)


class SWA(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.average, self.count = None, 0

    def on_epoch_end(self, epoch, logs=None):
        new = self.model.get_weights()
        self.count += 1
        if self.average is None:
            self.average = new
        else:
            self.average = [a + (w - a) / self.count for a, w in zip(self.average, new)]
        logs["swa_norm"] = float(np.sqrt(sum((a**2).sum() for a in self.average)))

    def on_train_end(self, logs=None):
        self.model.set_weights(self.average)


class Warmup(keras.callbacks.Callback):
    def __init__(self, total):
        super().__init__()
        self.step, self.total = 0, total

    def on_batch_begin(self, batch, logs=None):
        self.step += 1
        lr = 0.05 * min(1.0, self.step / 5) * 0.5 * (1 + np.cos(np.pi * self.step / self.total))
        self.model.optimizer.learning_rate.assign(lr)


# %%
hidden = keras.layers.Dense(16, activation="relu")
model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
finder = LRFinder()
model.fit(x, y, batch_size=20, epochs=5, callbacks=[finder], verbose=0)

# %%
log_file = Path(tempfile.mkdtemp(), "training.csv")
swa = []
for run in range(2):
    norms = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda e, logs: swa.append(logs["swa_norm"])
    )
    logger = keras.callbacks.CSVLogger(log_file, append=True)
    history = model.fit(
        x,
        y,
        batch_size=20,
        epochs=3,
        validation_split=0.2,
        verbose=0,
        callbacks=[Warmup(24), SWA(), logger, norms],
    )
with log_file.open() as f:
    rows = [[float(v) for v in row.values()] for row in csv.DictReader(f)]
print(len(rows))
