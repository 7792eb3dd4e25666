# framework: jax
# compare: losses; ensemble; mean; std

# %% [markdown]
# # A deep ensemble with one `vmap`
#
# Five networks are trained at the same time. The only change to the code for one network is two
# calls of `jax.vmap`: one for the initialization, one for the update.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np

NUM_MODELS = 5
HIDDEN = 20

# %% Toy data with a gap in the middle
rng = np.random.default_rng(21)
x_train = np.concatenate([rng.uniform(-4, -1, 64), rng.uniform(1, 4, 64)])[:, None]
y_train = np.sin(x_train) + 0.1 * rng.normal(size=x_train.shape)
shuffle = rng.permutation(128)
x_train, y_train = jnp.array(x_train[shuffle]), jnp.array(y_train[shuffle])


# %% One network
def init_fn(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "w1": jax.random.normal(k1, (1, HIDDEN)),
        "b1": jax.random.uniform(k2, (HIDDEN,), minval=-2, maxval=2),
        "w2": jax.random.normal(k3, (HIDDEN, 1)) / HIDDEN**0.5,
        "b2": jnp.zeros(1),
    }


def apply_fn(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def mse(params, x, y):
    return ((apply_fn(params, x) - y) ** 2).mean()


def update(params, x, y, lr=0.05):
    loss, grads = jax.value_and_grad(mse)(params, x, y)
    return jax.tree.map(lambda p, g: p - lr * g, params, grads), loss


# %% Many networks
keys = jax.random.split(jax.random.PRNGKey(0), NUM_MODELS)
ensemble = jax.vmap(init_fn)(keys)
print(jax.tree.map(lambda a: a.shape, ensemble))


@functools.partial(jax.jit, donate_argnums=0)
def ensemble_update(ensemble, x, y):
    return jax.vmap(update, in_axes=(0, None, None))(ensemble, x, y)


# %%
batch_size = 32
losses = []
for epoch in range(15):
    for i in range(0, len(x_train), batch_size):
        ensemble, loss = ensemble_update(
            ensemble, x_train[i : i + batch_size], y_train[i : i + batch_size]
        )
    losses.append(loss)
    if epoch % 5 == 4:
        print(epoch + 1, loss)

# %% Mean and spread of the predictions
x_grid = jnp.linspace(-5, 5, 21)[:, None]
members = jax.vmap(apply_fn, in_axes=(0, None))(ensemble, x_grid)
mean, std = members.mean(axis=0), members.std(axis=0)
for x, m, s in zip(x_grid[::5, 0], mean[::5, 0], std[::5, 0]):
    print(f"x = {x:+.1f}: {m:+.2f} +- {s:.2f}")
