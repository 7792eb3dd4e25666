# framework: jax
# compare: losses; jax.tree.leaves(eqx.filter(model, eqx.is_array)); samples.mean(0); samples

# %% [markdown]
# # Diffusion on a toy problem
#
# Denoising score matching with Equinox: add noise to the data at a random time, learn to predict
# it, then integrate the reverse equation from noise to data.

# %%
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


# %% The network takes a point and a time
class ScoreNet(eqx.Module):
    mlp: eqx.nn.MLP
    t1: float = eqx.field(static=True)

    def __init__(self, t1, *, key):
        self.t1 = t1
        self.mlp = eqx.nn.MLP(3, 2, width_size=32, depth=1, activation=jax.nn.silu, key=key)

    def __call__(self, t, y):
        t = jnp.atleast_1d(t / self.t1)
        return self.mlp(jnp.concatenate([y, t]))


def int_beta(t):
    return t


def weight(t):
    return 1 - jnp.exp(-int_beta(t))


# %%
def single_loss_fn(model, data, t, key):
    mean = data * jnp.exp(-0.5 * int_beta(t))
    var = jnp.maximum(1 - jnp.exp(-int_beta(t)), 1e-5)
    std = jnp.sqrt(var)
    noise = jr.normal(key, data.shape)
    y = mean + std * noise
    pred = model(t, y)
    return weight(t) * jnp.mean((pred + noise / std) ** 2)


def batch_loss_fn(model, data, key):
    batch_size = data.shape[0]
    tkey, losskey = jr.split(key)
    losskey = jr.split(losskey, batch_size)
    # one time in each part of the interval: less variance
    t = jr.uniform(tkey, (batch_size,), minval=0, maxval=model.t1 / batch_size)
    t = t + (model.t1 / batch_size) * jnp.arange(batch_size)
    return jnp.mean(jax.vmap(ft.partial(single_loss_fn, model))(data, t, losskey))


# %%
@eqx.filter_jit
def make_step(model, data, key, opt_state, opt_update):
    loss, grads = eqx.filter_value_and_grad(batch_loss_fn)(model, data, key)
    updates, opt_state = opt_update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    key = jr.split(key, 1)[0]
    return loss, model, key, opt_state


def dataloader(data, batch_size, *, key):
    indices = jnp.arange(data.shape[0])
    while True:
        key, subkey = jr.split(key, 2)
        perm = jr.permutation(subkey, indices)
        start = 0
        end = batch_size
        while end <= data.shape[0]:
            yield data[perm[start:end]]
            start = end
            end = start + batch_size


# %% Two blobs
key = jr.PRNGKey(5678)
data_key, model_key, train_key, loader_key, sample_key = jr.split(key, 5)
k1, k2 = jr.split(data_key)
side = jr.bernoulli(k1, 0.5, (256, 1)) * 2.0 - 1.0
data = side * jnp.array([1.0, 0.5]) + 0.1 * jr.normal(k2, (256, 2))

# %% Train
num_steps = 60
model = ScoreNet(t1=4.0, key=model_key)
opt = optax.adabelief(3e-3)
opt_state = opt.init(eqx.filter(model, eqx.is_inexact_array))

losses = []
total_value, total_size = 0, 0
for step, batch in zip(range(num_steps), dataloader(data, 64, key=loader_key)):
    value, model, train_key, opt_state = make_step(model, batch, train_key, opt_state, opt.update)
    losses.append(value.item())
    total_value += value.item()
    total_size += 1
    if (step % 20) == 0 or step == num_steps - 1:
        print(f"Step={step} Loss={total_value / total_size:.4f}")
        total_value, total_size = 0, 0


# %% Sample: Euler steps of the probability flow
@eqx.filter_jit
def sample(model, key, n_steps=20):
    dt = model.t1 / n_steps
    y1 = jr.normal(key, (2,))

    def euler(y, k):
        t = model.t1 - k * dt
        drift = -0.5 * (y + model(t, y))
        return y - dt * drift, None

    y0, _ = jax.lax.scan(euler, y1, jnp.arange(n_steps))
    return y0


samples = jax.vmap(ft.partial(sample, model))(jr.split(sample_key, 16))
print(samples[:4])
