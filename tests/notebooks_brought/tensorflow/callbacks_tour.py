# framework: tensorflow
# compare: history.history; model.get_weights(); seen["lr"]; best.predict(X_val, verbose=0)

# %% [markdown]
# # All the callbacks you need
# Early stopping, checkpoints, two ways to change the learning rate, and one of our own.

# %%
import os
import tempfile

import keras
import numpy as np
from keras import layers
from keras.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)

# %%
keras.utils.set_random_seed(99)

rng = np.random.default_rng(99)
X = rng.normal(size=(320, 10)).astype("float32")
w = rng.normal(size=(10, 1))
y = (X @ w + 0.3 * np.sin(3 * X[:, :1])).astype("float32")

X_train, X_val = X[:256], X[256:]
y_train, y_val = y[:256], y[256:]

# %%
model = keras.Sequential([layers.Dense(16, activation="tanh"), layers.Dense(1)])
model.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), loss="mse", metrics=["mae"])

# %%
seen = {"lr": [], "batches": 0}


class LogLearningRate(Callback):
    def on_train_begin(self, logs=None):
        print("Start. Keys:", list((logs or {}).keys()))

    def on_train_batch_end(self, batch, logs=None):
        seen["batches"] += 1
        if batch % 4 == 0:
            print(f"  batch {batch}: loss {logs['loss']:.4f}")

    def on_epoch_end(self, epoch, logs=None):
        lr = float(self.model.optimizer.learning_rate)
        seen["lr"].append(lr)
        print(f"  epoch {epoch}: lr {lr:.5f}, val_loss {logs['val_loss']:.4f}")


# %%
def schedule(epoch, lr):
    if epoch < 2:
        return lr
    return lr * 0.5


checkpoint_path = os.path.join(tempfile.mkdtemp(), "best.keras")

callbacks = [
    LearningRateScheduler(schedule),
    ReduceLROnPlateau(monitor="val_loss", factor=0.2, patience=1, min_delta=5.0, verbose=1),
    EarlyStopping(monitor="val_mae", patience=3, min_delta=10.0, restore_best_weights=True),
    ModelCheckpoint(checkpoint_path, monitor="val_loss", save_best_only=True, verbose=1),
    LogLearningRate(),
]

# %%
history = model.fit(
    X_train,
    y_train,
    batch_size=32,
    epochs=8,
    validation_data=(X_val, y_val),
    callbacks=callbacks,
    verbose=0,
)
print("stopped after", len(history.epoch), "epochs")

# %%
best = keras.models.load_model(checkpoint_path)
best.evaluate(X_val, y_val, verbose=0)
