# framework: jax
# compare: losses; params; grads_agree

# %% [markdown]
# # Data parallel training with `shard_map`
#
# Each device gets one part of the batch, computes its loss, and `pmean` averages the result. The
# same code runs on one device or many.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# %%
print("devices:", jax.devices())
mesh = jax.make_mesh((len(jax.devices()),), ("batch",))
split = NamedSharding(mesh, P("batch"))
replicated = NamedSharding(mesh, P())
mesh


# %%
def init_layer(key, n_in, n_out):
    k1, k2 = jax.random.split(key)
    W = jax.random.normal(k1, (n_in, n_out)) / jnp.sqrt(n_in)
    b = 0.1 * jax.random.normal(k2, (n_out,))
    return W, b


def init(key, layer_sizes):
    keys = jax.random.split(key, len(layer_sizes) - 1)
    sizes = zip(layer_sizes[:-1], layer_sizes[1:])
    return [init_layer(k, n_in, n_out) for k, (n_in, n_out) in zip(keys, sizes)]


def predict(params, inputs):
    for W, b in params:
        outputs = jnp.dot(inputs, W) + b
        inputs = jnp.maximum(outputs, 0)
    return outputs


def loss(params, batch):
    inputs, targets = batch
    predictions = predict(params, inputs)
    return jnp.mean(jnp.sum((predictions - targets) ** 2, axis=-1))


# %%
@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())
def loss_dp(params, local_batch):
    return jax.lax.pmean(loss(params, local_batch), "batch")


# %% Does it agree with the simple version?
params = init(jax.random.key(0), [6, 24, 24, 2])
rng = np.random.default_rng(1)
inputs = rng.normal(size=(256, 6)).astype(np.float32)
targets = np.stack([np.sin(inputs).sum(1), np.cos(inputs).sum(1)], 1).astype(np.float32)

first = inputs[:32], targets[:32]
g1 = jax.jit(jax.grad(loss))(params, first)
params = jax.device_put(params, replicated)
first = jax.device_put(first, split)
g2 = jax.jit(jax.grad(loss_dp))(params, first)
grads_agree = all(
    bool(jnp.allclose(a, b, atol=1e-4)) for a, b in zip(jax.tree.leaves(g1), jax.tree.leaves(g2))
)
print("gradients agree:", grads_agree)


# %%
@jax.jit
def gradient_step(params, batch):
    value, grads = jax.value_and_grad(loss_dp)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


losses = []
for epoch in range(5):
    for i in range(0, 256, 32):
        batch = jax.device_put((inputs[i : i + 32], targets[i : i + 32]), split)
        params, value = gradient_step(params, batch)
    losses.append(float(value))
    print(f"epoch {epoch}: {losses[-1]:.4f}")
