# framework: tensorflow
# compare: model.get_weights(); losses; history.history["loss"]; model(grid).numpy(); slope

# %% [markdown]
# # A surrogate model in double precision
#
# Scientific data, float64 throughout: a custom loop with a penalty on the derivative, then `fit`.

# %%
import keras
import numpy as np
import tensorflow as tf

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(3)

# %% Data: a damped oscillation and its derivative
rng = np.random.default_rng(3)
t = rng.uniform(0.0, 4.0, size=(240, 1))
y = np.exp(-0.4 * t) * np.cos(2.0 * t)
train_ds = tf.data.Dataset.from_tensor_slices((t, y)).shuffle(240, seed=1).batch(24)

# %%
model = keras.Sequential(
    [
        keras.Input((1,)),
        keras.layers.Dense(24, activation="tanh"),
        keras.layers.Dense(24, activation="tanh"),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 60))
mse = keras.losses.MeanSquaredError()


# %%
@tf.function
def train_step(x, y):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            prediction = model(x, training=True)
        derivative = inner.gradient(prediction, x)
        loss = mse(y, prediction) + 1e-3 * tf.reduce_mean(tf.square(derivative))
    gradients = outer.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


# %%
losses = []
for epoch in range(4):
    total = 0.0
    for x_batch, y_batch in train_ds:
        total += float(train_step(x_batch, y_batch))
    losses.append(total / 10)
    print(f"epoch {epoch + 1}: {losses[-1]:.6f}")

# %%
model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), loss="mse")
history = model.fit(t, y, batch_size=48, epochs=2, shuffle=False, verbose=0)

# %%
grid = np.linspace(0.0, 4.0, 9).reshape(-1, 1)
x = tf.constant(grid)
with tf.GradientTape() as tape:
    tape.watch(x)
    curve = model(x)
slope = tape.gradient(curve, x).numpy()
