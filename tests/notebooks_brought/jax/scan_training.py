# framework: jax
# compare: losses; params; sweep; best

# %% [markdown]
# # The whole epoch in one call
#
# For tiny models the time goes to Python and not to the arithmetic. With `jax.lax.scan` an epoch is
# one compiled call. At the end we sweep the learning rate with `vmap` over the whole training.

# %%
import jax
import jax.numpy as jnp
from jax import lax, random

# %%
N, D, BATCH = 256, 6, 32
k_data, k_true, k_init, k_perm = random.split(random.PRNGKey(123), 4)
inputs = random.normal(k_data, (N, D))
targets = jnp.sin(inputs @ random.normal(k_true, (D,)))


# %%
def model(params, x):
    h = jnp.tanh(x @ params["W1"] + params["b1"])
    return h @ params["W2"] + params["b2"]


def init(key):
    ka, kb = random.split(key)
    return {
        "W1": random.normal(ka, (D, 32)) / jnp.sqrt(D),
        "b1": jnp.zeros(32),
        "W2": random.normal(kb, (32,)) / jnp.sqrt(32.0),
        "b2": jnp.array(0.0),
    }


def loss_fn(params, x, y):
    return jnp.mean((model(params, x) - y) ** 2)


# %%
def one_epoch(params, key, lr):
    perm = random.permutation(key, N)
    xs = inputs[perm].reshape(N // BATCH, BATCH, D)
    ys = targets[perm].reshape(N // BATCH, BATCH)

    def body(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), loss

    return lax.scan(body, params, (xs, ys))


train_epoch = jax.jit(one_epoch)

# %%
params = init(k_init)
losses = []
for epoch, key in enumerate(random.split(k_perm, 8)):
    params, epoch_losses = train_epoch(params, key, 0.1)
    losses.append(epoch_losses)
    print(f"epoch {epoch}: mean loss {epoch_losses.mean():.4f}")
losses = jnp.concatenate(losses)


# %% [markdown]
# ## Sweep

# %%
start = init(k_init)
sweep_keys = random.split(k_perm, 4)


@jax.jit
@jax.vmap
def final_loss(lr):
    def epoch(params, key):
        params, losses = one_epoch(params, key, lr)
        return params, losses[-1]

    params, _ = lax.scan(epoch, start, sweep_keys)
    return loss_fn(params, inputs, targets)


rates = jnp.array([0.003, 0.01, 0.03, 0.1])
sweep = final_loss(rates)
best = rates[sweep.argmin()]
print(dict(zip(rates.tolist(), sweep.tolist())), "best:", best)
