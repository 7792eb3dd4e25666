# framework: tensorflow
# compare: log; encoder.get_weights(); decoder.get_weights(); decoded

# %% [markdown]
# # Variational autoencoder
#
# The noise of the sampling layer is part of the data set, so that every run gives the same
# numbers.

# %%
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tqdm.auto import tqdm

keras.utils.set_random_seed(2)

# %%
latent_dim = 2
original_dim = 36

rng = np.random.default_rng(2)
angle = rng.uniform(0, 2 * np.pi, size=(320, 1))
x_train = (0.5 + 0.5 * np.sin(angle + np.linspace(0, 6, original_dim))).astype("float32")
epsilon = rng.normal(size=(320, latent_dim)).astype("float32")

train_dataset = tf.data.Dataset.from_tensor_slices((x_train, epsilon))
train_dataset = train_dataset.shuffle(buffer_size=320, seed=2).batch(32)


# %%
class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z, the vector encoding a digit."""

    def call(self, inputs):
        z_mean, z_log_var, eps = inputs
        return z_mean + tf.exp(0.5 * z_log_var) * eps


# %% Encoder
encoder_inputs = keras.Input(shape=(original_dim,))
eps_inputs = keras.Input(shape=(latent_dim,))
h = layers.Dense(16, activation="relu")(encoder_inputs)
z_mean = layers.Dense(latent_dim, name="z_mean")(h)
z_log_var = layers.Dense(latent_dim, name="z_log_var")(h)
z = Sampling()([z_mean, z_log_var, eps_inputs])
encoder = keras.Model([encoder_inputs, eps_inputs], [z_mean, z_log_var, z], name="encoder")

# %% Decoder
latent_inputs = keras.Input(shape=(latent_dim,))
h = layers.Dense(16, activation="relu")(latent_inputs)
decoder_outputs = layers.Dense(original_dim, activation="sigmoid")(h)
decoder = keras.Model(latent_inputs, decoder_outputs, name="decoder")


# %%
def compute_losses(x, eps):
    mean, log_var, z = encoder([x, eps])
    reconstruction = decoder(z)
    reconstruction_loss = tf.reduce_mean(
        tf.reduce_sum(keras.losses.binary_crossentropy(x[..., None], reconstruction[..., None]), 1)
    )
    kl_loss = -0.5 * (1 + log_var - tf.square(mean) - tf.exp(log_var))
    kl_loss = tf.reduce_mean(tf.reduce_sum(kl_loss, axis=1))
    return {
        "loss": reconstruction_loss + kl_loss,
        "reconstruction": reconstruction_loss,
        "kl": kl_loss,
    }


# %%
optimizer = keras.optimizers.Adam(learning_rate=1e-2)
trackers = {name: keras.metrics.Mean(name=name) for name in ["loss", "reconstruction", "kl"]}
weights = encoder.trainable_weights + decoder.trainable_weights
log = []

for epoch in range(3):
    progress = tqdm(train_dataset, desc=f"Epoch {epoch}")
    for x_batch, eps_batch in progress:
        with tf.GradientTape() as tape:
            losses = compute_losses(x_batch, eps_batch)
        grads = tape.gradient(losses["loss"], weights)
        optimizer.apply_gradients(zip(grads, weights))
        for name, value in losses.items():
            trackers[name].update_state(value)
        progress.set_postfix(loss=float(losses["loss"]))

    log.append({name: float(t.result()) for name, t in trackers.items()})
    for t in trackers.values():
        t.reset_state()
    print(log[-1])

# %% Walk through the latent space
grid = np.array([[a, b] for a in (-1.0, 0.0, 1.0) for b in (-1.0, 0.0, 1.0)], "float32")
decoded = decoder.predict(grid, verbose=0)
decoded.shape
