# framework: tensorflow
# compare: epoch_losses; model.get_weights(); float(val_acc); float(train_acc)

# %% [markdown]
# # Writing a training loop from scratch
#
# `fit()` is easy, but sometimes you want to see every step.

# %%
import time

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(0)

# %%
inputs = keras.Input(shape=(64,), name="digits")
x1 = layers.Dense(32, activation="relu")(inputs)
x2 = layers.Dense(32, activation="relu")(x1)
outputs = layers.Dense(10, name="predictions")(x2)
model = keras.Model(inputs=inputs, outputs=outputs)

# %% Optimizer, loss, data
optimizer = keras.optimizers.SGD(learning_rate=0.05)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

batch_size = 16
rng = np.random.default_rng(0)
centers = rng.normal(size=(10, 64))
y_all = rng.integers(0, 10, size=448)
x_all = (centers[y_all] + rng.normal(size=(448, 64))).astype("float32")

x_train, y_train = x_all[:384], y_all[:384]
x_val, y_val = x_all[384:], y_all[384:]

train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
train_dataset = train_dataset.shuffle(buffer_size=384, seed=1).batch(batch_size)

val_dataset = tf.data.Dataset.from_tensor_slices((x_val, y_val))
val_dataset = val_dataset.batch(batch_size)

# %%
train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
val_acc_metric = keras.metrics.SparseCategoricalAccuracy()
epoch_losses = []

# %% [markdown]
# ## The loop
#
# Here is the flow: an outer loop over epochs, an inner loop over batches, a `GradientTape`.

# %%
epochs = 2
for epoch in range(epochs):
    print("\nStart of epoch %d" % (epoch,))
    start_time = time.time()
    total = 0.0

    # Iterate over the batches of the dataset.
    for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
        with tf.GradientTape() as tape:
            logits = model(x_batch_train, training=True)
            loss_value = loss_fn(y_batch_train, logits)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights))

        # Update training metric.
        train_acc_metric.update_state(y_batch_train, logits)
        total += float(loss_value)

        # Log every 10 batches.
        if step % 10 == 0:
            print("Training loss (for one batch) at step %d: %.4f" % (step, float(loss_value)))
            print("Seen so far: %s samples" % ((step + 1) * batch_size))

    epoch_losses.append(total / (step + 1))

    # Display metrics at the end of each epoch.
    train_acc = train_acc_metric.result()
    print("Training acc over epoch: %.4f" % (float(train_acc),))

    # Reset training metrics at the end of each epoch
    train_acc_metric.reset_state()

    # Run a validation loop at the end of each epoch.
    for x_batch_val, y_batch_val in val_dataset:
        val_logits = model(x_batch_val, training=False)
        val_acc_metric.update_state(y_batch_val, val_logits)
    val_acc = val_acc_metric.result()
    val_acc_metric.reset_state()
    print("Validation acc: %.4f" % (float(val_acc),))
    print("Time taken: %.2fs" % (time.time() - start_time))
