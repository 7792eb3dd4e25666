# framework: tensorflow
# compare: history.history["loss"]; history_fine.history["loss"]; model.get_weights()

# %% [markdown]
# # Transfer learning: freeze, train the head, then fine-tune
#
# There is no network here, so we train the base on another task first.

# %%
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(10)

# %%
rng = np.random.default_rng(10)


def blobs(n, num_classes):
    y = rng.integers(0, num_classes, n)
    x = rng.normal(scale=0.4, size=(n, 16, 16, 1))
    for c in range(num_classes):
        x[y == c, c * 2 : c * 2 + 4, ::2] += 1.0
    return x.astype("float32"), y


x_source, y_source = blobs(256, 5)
x_target, y_target = blobs(128, 2)
x_val, y_val = blobs(64, 2)

# %% Base model
base_model = tf.keras.Sequential(
    [
        tf.keras.Input((16, 16, 1)),
        tf.keras.layers.Conv2D(8, 3, use_bias=False),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.ReLU(),
        tf.keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        tf.keras.layers.Flatten(),
    ],
    name="base",
)

pretraining = tf.keras.Sequential([base_model, tf.keras.layers.Dense(5)])
pretraining.compile(
    optimizer="adam",
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
pretraining.fit(x_source, y_source, batch_size=32, epochs=2)

# %% [markdown]
# ## Feature extraction
# It is important to freeze the base before you compile.

# %%
base_model.trainable = False

inputs = tf.keras.Input(shape=(16, 16, 1))
x = base_model(inputs, training=False)
outputs = tf.keras.layers.Dense(1)(x)
model = tf.keras.Model(inputs, outputs)

print("trainable:", len(model.trainable_weights))

# %%
base_learning_rate = 0.001
model.compile(
    optimizer=tf.keras.optimizers.Adam(learning_rate=base_learning_rate),
    loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
)

# %%
initial_epochs = 2

loss0, accuracy0 = model.evaluate(x_val, y_val)
history = model.fit(
    x_target, y_target, batch_size=16, epochs=initial_epochs, validation_data=(x_val, y_val)
)

# %% [markdown]
# ## Fine tuning

# %%
base_model.trainable = True

fine_tune_at = 3
for layer in base_model.layers[:fine_tune_at]:
    layer.trainable = False

model.compile(
    optimizer=tf.keras.optimizers.RMSprop(learning_rate=base_learning_rate / 10),
    loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
)
print("trainable:", len(model.trainable_weights))

# %%
history_fine = model.fit(
    x_target,
    y_target,
    batch_size=16,
    epochs=initial_epochs + 1,
    initial_epoch=history.epoch[-1] + 1,
    validation_data=(x_val, y_val),
)
