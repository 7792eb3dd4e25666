# framework: jax
# compare: g_losses; d_losses; g_params; d_params; fake_stats

# %% [markdown]
# # A small GAN with two optimizers
#
# The generator learns a ring in the plane. Generator and discriminator have their own parameters
# and their own Adam.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

batch_size = 64
latent_dim = 4


# %% Networks
def mlp_init(key, sizes):
    params = []
    for fan_in, fan_out in zip(sizes[:-1], sizes[1:]):
        key, sub = jax.random.split(key)
        w = jax.random.normal(sub, (fan_in, fan_out)) * jnp.sqrt(2.0 / fan_in)
        params.append((w, jnp.zeros(fan_out)))
    return params


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.leaky_relu(x @ w + b, 0.2)
    w, b = params[-1]
    return x @ w + b


key = jax.random.key(2024)
key, gk, dk = jax.random.split(key, 3)
g_params = mlp_init(gk, [latent_dim, 32, 2])
d_params = mlp_init(dk, [2, 32, 1])

g_tx = optax.adam(2e-3, b1=0.5)
d_tx = optax.adam(2e-3, b1=0.5)
g_state = g_tx.init(g_params)
d_state = d_tx.init(d_params)

# %% Real data
rng = np.random.default_rng(0)
phi = rng.uniform(0, 2 * np.pi, size=512)
ring = np.stack([np.cos(phi), np.sin(phi)], axis=1) + 0.05 * rng.normal(size=(512, 2))
ring = ring.astype(np.float32)


# %% Losses
def d_loss_fn(d_params, g_params, real, z):
    real_logits = mlp(d_params, real)
    fake_logits = mlp(d_params, mlp(g_params, z))
    real_loss = optax.sigmoid_binary_cross_entropy(real_logits, jnp.ones_like(real_logits))
    fake_loss = optax.sigmoid_binary_cross_entropy(fake_logits, jnp.zeros_like(fake_logits))
    return (real_loss + fake_loss).mean()


def g_loss_fn(g_params, d_params, z):
    fake_logits = mlp(d_params, mlp(g_params, z))
    return optax.sigmoid_binary_cross_entropy(fake_logits, jnp.ones_like(fake_logits)).mean()


@jax.jit
def d_step(d_params, d_state, g_params, real, z):
    loss, grads = jax.value_and_grad(d_loss_fn)(d_params, g_params, real, z)
    updates, d_state = d_tx.update(grads, d_state)
    return optax.apply_updates(d_params, updates), d_state, loss


@jax.jit
def g_step(g_params, g_state, d_params, z):
    loss, grads = jax.value_and_grad(g_loss_fn)(g_params, d_params, z)
    updates, g_state = g_tx.update(grads, g_state)
    return optax.apply_updates(g_params, updates), g_state, loss


# %% Training, one step of each in turn
g_losses, d_losses = [], []
for step in range(60):
    real = ring[rng.integers(0, len(ring), batch_size)]
    key, zk1, zk2 = jax.random.split(key, 3)
    d_params, d_state, d_loss = d_step(
        d_params, d_state, g_params, real, jax.random.normal(zk1, (batch_size, latent_dim))
    )
    g_params, g_state, g_loss = g_step(
        g_params, g_state, d_params, jax.random.normal(zk2, (batch_size, latent_dim))
    )
    d_losses.append(d_loss)
    g_losses.append(g_loss)
    if step % 15 == 0:
        print(f"[{step}] D {d_loss:.3f} G {g_loss:.3f}")

# %% How far are the fakes from the ring?
fake = jax.jit(mlp)(g_params, jax.random.normal(jax.random.key(1), (256, latent_dim)))
radius = jnp.linalg.norm(fake, axis=1)
fake_stats = jnp.array([radius.mean(), radius.std()])
print("radius: mean {:.3f}, std {:.3f}".format(*fake_stats))
