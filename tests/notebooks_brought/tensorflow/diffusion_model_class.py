# framework: tensorflow
# compare: losses; model.network.get_weights(); model.ema_network.get_weights(); samples

# %% [markdown]
# # A diffusion model as a Keras class
#
# `train_step` mixes data with noise, predicts the noise, and keeps a moving average of the weights.

# %%
import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(6)
EMA = 0.9

# %% Each element has its own noise and diffusion time
rng = np.random.default_rng(4)
points = rng.normal(size=(256, 1)) * 0.3 + np.sign(rng.normal(size=(256, 1)))
points = np.concatenate([points, points**2], 1).astype("float32")
noises = rng.normal(size=points.shape).astype("float32")
times = rng.uniform(size=(256, 1)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((points, noises, times)).batch(32).prefetch(2)


# %%
def get_network():
    noisy, rates = keras.Input((2,)), keras.Input((1,))
    x = layers.Concatenate()([noisy, rates])
    x = layers.Dense(24, activation="swish")(x)
    x = layers.Dense(24, activation="swish")(x)
    return keras.Model([noisy, rates], layers.Dense(2, kernel_initializer="zeros")(x))


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = get_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def diffusion_schedule(self, diffusion_times):
        start, end = math.acos(0.95), math.acos(0.02)
        angles = start + diffusion_times * (end - start)
        return tf.sin(angles), tf.cos(angles)

    def train_step(self, data):
        images, noise, diffusion_times = data
        images = self.normalizer(images, training=True)
        noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
        noisy_images = signal_rates * images + noise_rates * noise
        with tf.GradientTape() as tape:
            pred_noises = self.network([noisy_images, noise_rates**2], training=True)
            noise_loss = self.loss(noise, pred_noises)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(noise_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(EMA * ema_weight + (1 - EMA) * weight)
        return {m.name: m.result() for m in self.metrics}

    def generate(self, noise, diffusion_steps):
        step = 1.0 / diffusion_steps
        x = noise
        for i in range(diffusion_steps):
            t = tf.ones((len(noise), 1)) - i * step
            noise_rates, signal_rates = self.diffusion_schedule(t)
            pred_noise = self.ema_network([x, noise_rates**2], training=False)
            pred = (x - noise_rates * pred_noise) / signal_rates
            next_noise, next_signal = self.diffusion_schedule(t - step)
            x = next_signal * pred + next_noise * pred_noise
        return pred


# %%
model = DiffusionModel()
model.compile(
    optimizer=keras.optimizers.AdamW(5e-3, weight_decay=1e-4), loss=keras.losses.MeanAbsoluteError()
)
model.normalizer.adapt(dataset.map(lambda x, noise, t: x))
losses = model.fit(dataset, epochs=4, verbose=2).history["n_loss"]

# %%
samples = np.array(model.generate(tf.constant(noises[:8]), 5))
print(samples[:3])
