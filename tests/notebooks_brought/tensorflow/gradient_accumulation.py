# framework: tensorflow
# compare: losses; model.get_weights(); updates; float(metric.result())

# %% [markdown]
# # Gradient accumulation
#
# My GPU is too small for a batch of 64. Four batches of 16 give the same gradient:
# sum the gradients, divide, then apply once.

# %%
import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1234)

# %%
MICRO_BATCH = 16
ACCUM_STEPS = 4
EPOCHS = 3

data = np.random.rand(256, 20).astype("float32")  # seeded above
target = (data.mean(axis=1) > 0.5).astype("int32")

dataset = tf.data.Dataset.from_tensor_slices((data, target)).batch(MICRO_BATCH)

# %%
model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((20,)),
        tf.keras.layers.Dense(32, activation="swish"),
        tf.keras.layers.Dense(2),
    ]
)
optimizer = tf.keras.optimizers.Adam(1e-2)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
metric = tf.keras.metrics.SparseCategoricalAccuracy()


# %%
@tf.function
def compute_gradients(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_fn(y, logits) / ACCUM_STEPS
    metric.update_state(y, logits)
    return loss, tape.gradient(loss, model.trainable_variables)


# %% Train
losses = []
updates = 0

for epoch in range(EPOCHS):
    metric.reset_state()
    accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
    running = 0.0

    for step, (x, y) in enumerate(dataset):
        loss, grads = compute_gradients(x, y)
        accumulated = [a + g for a, g in zip(accumulated, grads)]
        running += loss.numpy()

        if (step + 1) % ACCUM_STEPS == 0:
            optimizer.apply_gradients(zip(accumulated, model.trainable_variables))
            accumulated = [tf.zeros_like(v) for v in model.trainable_variables]
            losses.append(running)
            running = 0.0
            updates += 1

    print(f"Epoch {epoch + 1}: loss={losses[-1]:.4f} acc={metric.result().numpy():.3f}")

# %%
print(updates, "updates,", optimizer.iterations.numpy(), "optimizer iterations")
