# framework: jax
# compare: losses; params; ema_params; (raw_mse, ema_mse)

# %% [markdown]
# # MultiSteps, weight decay with a mask, and averaged weights
#
# Three Optax tricks in one script:
#
# 1. `optax.MultiSteps` applies the optimizer every `k` small batches,
# 2. `optax.adamw(mask=...)` leaves the biases without weight decay,
# 3. an exponential moving average of the parameters is used for the evaluation.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import trange

# %%
key = jax.random.PRNGKey(0)
key, k_x, k_w, k_noise = jax.random.split(key, 4)
X = jax.random.normal(k_x, (256, 8))
teacher = jax.random.normal(k_w, (8,))
Y = jnp.tanh(X @ teacher) + 0.02 * jax.random.normal(k_noise, (256,))

X_train, X_valid = X[:192], X[192:]
Y_train, Y_valid = Y[:192], Y[192:]


# %%
def data_stream(batch_size, seed=0):
    """Endless stream of shuffled batches."""
    rng = np.random.RandomState(seed)
    num_batches = len(X_train) // batch_size
    while True:
        perm = rng.permutation(len(X_train))
        for i in range(num_batches):
            sel = perm[i * batch_size : (i + 1) * batch_size]
            yield X_train[sel], Y_train[sel]


def init(key, width=16):
    k1, k2 = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_normal()
    return {
        "w1": glorot(k1, (8, width)),
        "b1": jnp.zeros((width,)),
        "w2": glorot(k2, (width, 1)),
        "b2": jnp.zeros((1,)),
    }


def net(params, x):
    h = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return jnp.squeeze(h @ params["w2"] + params["b2"], axis=-1)


@jax.jit
def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(optax.l2_loss(net(params, x), y))


# %% The optimizer
decay_mask = {"w1": True, "b1": False, "w2": True, "b2": False}
tx = optax.MultiSteps(optax.adamw(5e-3, weight_decay=1e-2, mask=decay_mask), every_k_schedule=4)

params = init(key)
opt_state = tx.init(params)
ema_params = params


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss


@jax.jit
def ema_update(params, ema_params):
    return optax.incremental_update(params, ema_params, step_size=0.1)


# %% Train
it = data_stream(batch_size=16)
losses = []
for step in (pbar := trange(80, leave=False)):
    batch = next(it)
    params, opt_state, loss = train_step(params, opt_state, batch)
    if tx.has_updated(opt_state):
        ema_params = ema_update(params, ema_params)
    losses.append(loss)
    if step % 20 == 0:
        pbar.set_postfix(loss=f"{loss:.4f}")

# %%
print("optimizer steps:", opt_state.gradient_step)
print("losses:", [f"{loss:.4f}" for loss in losses[::10]])

# %% Evaluate both sets of weights
raw_mse = loss_fn(params, (X_valid, Y_valid))
ema_mse = loss_fn(ema_params, (X_valid, Y_valid))
print(f"raw {raw_mse:.5f}, averaged {ema_mse:.5f}")
