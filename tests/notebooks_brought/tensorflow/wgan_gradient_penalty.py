# framework: tensorflow
# compare: d_losses; g_losses; critic.get_weights(); generator.get_weights()

# %% [markdown]
# # WGAN with a gradient penalty
#
# The critic is trained three times for each batch. The penalty is the norm of its input gradients
# between real and generated samples.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(12)
LATENT, GP_WEIGHT, D_STEPS = 4, 10.0, 3

# %% Points on a circle, with the noise for each of them
rng = np.random.default_rng(2)
angle = rng.uniform(0, 2 * np.pi, 192)
real = np.stack([np.cos(angle), np.sin(angle)], 1).astype("float32")
noise = rng.normal(size=(192, D_STEPS + 1, LATENT)).astype("float32")
mix = rng.uniform(size=(192, D_STEPS, 1)).astype("float32")
train_ds = tf.data.Dataset.from_tensor_slices((real, noise, mix)).batch(32)

# %% Networks
critic = keras.Sequential(
    [keras.Input((2,)), layers.Dense(16), layers.LeakyReLU(), layers.Dense(1)]
)
generator = keras.Sequential(
    [keras.Input((LATENT,)), layers.Dense(16, activation="relu"), layers.Dense(2)]
)
d_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)
g_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)


# %%
def gradient_penalty(real_points, fake_points, epsilon):
    interpolated = real_points + epsilon * (fake_points - real_points)
    with tf.GradientTape() as gp_tape:
        gp_tape.watch(interpolated)
        pred = critic(interpolated, training=True)
    grads = gp_tape.gradient(pred, [interpolated])[0]
    norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=1) + 1e-12)
    return tf.reduce_mean((norm - 1.0) ** 2)


@tf.function
def train_step(points, z, epsilon):
    for i in range(D_STEPS):
        with tf.GradientTape() as tape:
            fake = generator(z[:, i], training=True)
            d_cost = tf.reduce_mean(critic(fake, training=True)) - tf.reduce_mean(
                critic(points, training=True)
            )
            d_loss = d_cost + GP_WEIGHT * gradient_penalty(points, fake, epsilon[:, i])
        d_grads = tape.gradient(d_loss, critic.trainable_variables)
        d_optimizer.apply_gradients(zip(d_grads, critic.trainable_variables))
    with tf.GradientTape() as tape:
        g_loss = -tf.reduce_mean(critic(generator(z[:, D_STEPS], training=True), training=True))
    g_grads = tape.gradient(g_loss, generator.trainable_variables)
    g_optimizer.apply_gradients(zip(g_grads, generator.trainable_variables))
    return {"d_loss": d_loss, "g_loss": g_loss}


# %%
d_losses, g_losses = [], []
for epoch in range(3):
    for points, z, epsilon in train_ds:
        losses = train_step(points, z, epsilon)
        d_losses.append(losses["d_loss"].numpy())
        g_losses.append(losses["g_loss"].numpy())
    print(f"epoch {epoch + 1}: critic {d_losses[-1]:.4f}, generator {g_losses[-1]:.4f}")
