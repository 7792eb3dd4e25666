# framework: tensorflow
# compare: steps_done; seen; list(probs.shape); int(optimizer.iterations); model.count_params()

# %% [markdown]
# # Random augmentation and dropout in a custom loop, with a progress bar
#
# The images are plain NumPy arrays, split into batches by hand.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

# %%
batch_size = 32
rng = np.random.default_rng(0)

y_train = rng.integers(0, 2, size=128)
x_train = rng.uniform(0, 0.3, size=(128, 20, 20, 1)).astype("float32")
x_train[y_train == 1, 8:12, 8:12] += 0.7

batches_x = np.array_split(x_train, len(x_train) // batch_size)
batches_y = np.array_split(y_train, len(y_train) // batch_size)

# %%
augment = keras.Sequential(
    [
        layers.RandomFlip("horizontal_and_vertical"),
        layers.RandomTranslation(0.1, 0.1),
    ]
)

model = keras.Sequential(
    [
        keras.Input((20, 20, 1)),
        layers.Conv2D(8, 3, strides=2, activation="relu"),
        layers.GlobalMaxPooling2D(),
        layers.Dropout(0.5),
        layers.Dense(2),
    ]
)
optimizer = keras.optimizers.Nadam(0.01)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
acc = keras.metrics.SparseCategoricalAccuracy()


# %%
@tf.function
def train_on(images, labels):
    images = augment(images, training=True)
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_fn(labels, logits)
    grads = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(grads, model.trainable_weights))
    acc.update_state(labels, logits)
    return loss


# %%
epochs = 3
steps_done = 0
seen = 0

for epoch in range(epochs):
    print(f"\nEpoch {epoch + 1}/{epochs}")
    progbar = keras.utils.Progbar(len(batches_x), stateful_metrics=["acc"])
    acc.reset_state()
    for xb, yb in zip(batches_x, batches_y):
        loss = train_on(xb, yb)
        steps_done += 1
        seen += len(xb)
        progbar.add(1, values=[("loss", float(loss)), ("acc", float(acc.result()))])

# %%
probs = tf.nn.softmax(model(x_train[:10], training=False)).numpy()
probs.round(2)
