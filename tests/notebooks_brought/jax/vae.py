# framework: jax
# compare: train_elbo; test_elbo; params; samples

# %% [markdown]
# # A variational autoencoder
#
# A small VAE on binary pictures with 36 pixels. Noise comes from explicit keys.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import random

# %% Pictures: rectangles
SIZE = 6
LATENTS = 2


def rectangles(n, seed):
    rng = np.random.default_rng(seed)
    out = np.zeros((n, SIZE, SIZE), np.float32)
    for k in range(n):
        r, c = rng.integers(0, 4, size=2)
        h, w = rng.integers(2, 4, size=2)
        out[k, r : r + h, c : c + w] = 1.0
    return out.reshape(n, SIZE * SIZE)


train_images = rectangles(256, 0)
test_images = rectangles(64, 1)
print(train_images[0].reshape(SIZE, SIZE).astype(int))


# %% Model
class Encoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="fc1")(x))
        mean_x = nn.Dense(self.latents, name="fc2_mean")(x)
        logvar_x = nn.Dense(self.latents, name="fc2_logvar")(x)
        return mean_x, logvar_x


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z):
        z = nn.relu(nn.Dense(32, name="fc1")(z))
        return nn.Dense(SIZE * SIZE, name="fc2")(z)


def reparameterize(rng, mean, logvar):
    std = jnp.exp(0.5 * logvar)
    eps = random.normal(rng, logvar.shape)
    return mean + eps * std


class VAE(nn.Module):
    latents: int = LATENTS

    def setup(self):
        self.encoder = Encoder(self.latents)
        self.decoder = Decoder()

    def __call__(self, x, z_rng):
        mean, logvar = self.encoder(x)
        z = reparameterize(z_rng, mean, logvar)
        return self.decoder(z), mean, logvar

    def generate(self, z):
        return nn.sigmoid(self.decoder(z))


# %% Loss
@jax.vmap
def kl_divergence(mean, logvar):
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))


@jax.vmap
def bce(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels).sum()


def negative_elbo(params, batch, z_rng):
    recon, mean, logvar = vae.apply({"params": params}, batch, z_rng)
    return bce(recon, batch).mean() + kl_divergence(mean, logvar).mean()


# %%
vae = VAE()
rng = random.key(0)
rng, init_key = random.split(rng)
params = jax.jit(vae.init)(init_key, jnp.ones((1, SIZE * SIZE)), rng)["params"]
tx = optax.adam(3e-3)
opt_state = tx.init(params)


@jax.jit
def train_step(params, opt_state, batch, z_rng):
    loss, grads = jax.value_and_grad(negative_elbo)(params, batch, z_rng)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


# %% Train
train_elbo = []
for epoch in range(6):
    for batch in np.split(train_images, 8):
        rng, key = random.split(rng)
        params, opt_state, loss = train_step(params, opt_state, batch, key)
    train_elbo.append(float(loss))
    print(f"epoch {epoch + 1}: {loss:.3f}")

# %% Test and sample
rng, eval_rng, z_key = random.split(rng, 3)
test_elbo = jax.jit(negative_elbo)(params, test_images, eval_rng)
print("test:", test_elbo)

z = random.normal(z_key, (4, LATENTS))
samples = vae.apply({"params": params}, z, method=vae.generate)
print((samples[0].reshape(SIZE, SIZE) > 0.5).astype(int))
