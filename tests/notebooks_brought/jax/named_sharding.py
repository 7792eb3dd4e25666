# framework: jax
# compare: losses; params; preds; total_norm

# %% [markdown]
# # Sharding by hand
#
# We build our own mesh, put the batch on it with `NamedSharding`, keep the parameters on all
# devices, and let `jax.jit` insert the communication.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# %%
n_devices = len(jax.devices())
mesh = jax.make_mesh((n_devices,), ("data",))
data_sharding = NamedSharding(mesh, P("data"))
replicated = NamedSharding(mesh, P())
print(mesh)

# %% A sharded array is still an array
z = jax.device_put(jnp.arange(16.0).reshape(8, 2), data_sharding)
print(z.sharding)
total_norm = jnp.sqrt((z**2).sum())
print("norm:", total_norm)


# %% Model
def init_params(key):
    k1, k2 = jax.random.split(key)
    return {
        "w1": jax.random.normal(k1, (5, 32)) * 0.4,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(k2, (32, 1)) * 0.2,
        "b2": jnp.zeros(1),
    }


@jax.jit
def forward(params, x):
    h = jax.nn.silu(x @ params["w1"] + params["b1"])
    return (h @ params["w2"] + params["b2"])[:, 0]


def loss_fn(params, x, y):
    return optax.huber_loss(forward(params, x), y).mean()


tx = optax.adam(1e-2)
params = jax.device_put(init_params(jax.random.key(0)), replicated)
opt_state = jax.device_put(tx.init(params), replicated)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss


# %% Data
rng = np.random.default_rng(0)
x_all = rng.normal(size=(256, 5)).astype(np.float32)
y_all = (x_all[:, 0] * x_all[:, 1] + np.abs(x_all[:, 2])).astype(np.float32)

# %% Train
batch_size = 64
losses = []
for epoch in range(8):
    perm = rng.permutation(len(x_all))
    for i in range(0, len(x_all), batch_size):
        idx = perm[i : i + batch_size]
        x = jax.device_put(x_all[idx], data_sharding)
        y = jax.device_put(y_all[idx], data_sharding)
        params, opt_state, loss = train_step(params, opt_state, x, y)
        losses.append(float(loss))
    print(f"epoch {epoch}: loss {losses[-1]:.4f}")

# %% Predict on replicated inputs
preds = forward(params, jax.device_put(x_all[:10], replicated))
print(preds)
