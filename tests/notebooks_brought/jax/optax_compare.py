# framework: jax
# compare: curves; final; {name: predict(p, x_test) for name, p in trained.items()}

# %% [markdown]
# # Which optimizer?
#
# We train the same small network with several Optax optimizers and compare the curves.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

# %%
rng = np.random.default_rng(3)
n = 250
x_train = rng.uniform(-3, 3, size=(n, 1)).astype(np.float32)
y_train = np.sin(x_train) + 0.1 * rng.normal(size=(n, 1)).astype(np.float32)
x_test = np.linspace(-3, 3, 40, dtype=np.float32)[:, None]
y_test = np.sin(x_test)


# %%
def init_params(key):
    k1, k2 = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(k1, (1, 24)), "bias": jnp.zeros(24)},
        "out": {"kernel": jax.random.normal(k2, (24, 1)) / 5.0, "bias": jnp.zeros(1)},
    }


def predict(params, x):
    h = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return h @ params["out"]["kernel"] + params["out"]["bias"]


def loss_fn(params, x, y):
    return optax.squared_error(predict(params, x), y).mean()


# %%
batch_size = 32
epochs = 3
steps_per_epoch = -(-n // batch_size)
total_steps = epochs * steps_per_epoch

warmup = optax.warmup_cosine_decay_schedule(
    init_value=0.0, peak_value=0.02, warmup_steps=8, decay_steps=total_steps, end_value=1e-4
)

optimizers = {
    "sgd + momentum": optax.sgd(0.02, momentum=0.9),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(warmup)),
}


# %%
def fit(tx, params):
    opt_state = tx.init(params)
    order = np.random.default_rng(0)

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    history = []
    for _ in range(epochs):
        perm = order.permutation(n)
        for i in range(0, n, batch_size):
            idx = perm[i : i + batch_size]
            params, opt_state, loss = step(params, opt_state, x_train[idx], y_train[idx])
            history.append(loss.item())
    return params, history


# %%
curves, trained = {}, {}
for name, tx in optimizers.items():
    trained[name], curves[name] = fit(tx, init_params(jax.random.key(1)))
    print(f"{name:18s} first {curves[name][0]:.4f} last {curves[name][-1]:.4f}")

# %% [markdown]
# Lookahead keeps two copies of the parameters, *fast* and *slow*, so its loop is a bit different.

# %%
fast = init_params(jax.random.key(1))
lookahead = optax.lookahead(optax.sgd(0.05), sync_period=5, slow_step_size=0.5)
la_params = optax.LookaheadParams.init_synced(fast)
la_state = lookahead.init(la_params)


@jax.jit
def la_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params.fast, x, y)
    updates, state = lookahead.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


curves["lookahead"] = []
perm = np.random.default_rng(0).permutation(n)
for i in range(0, n, batch_size):
    idx = perm[i : i + batch_size]
    la_params, la_state, loss = la_step(la_params, la_state, x_train[idx], y_train[idx])
    curves["lookahead"].append(loss.item())
trained["lookahead"] = la_params.slow

# %% Scores on the test set
final = {name: float(loss_fn(p, x_test, y_test)) for name, p in trained.items()}
for name, value in sorted(final.items(), key=lambda item: item[1]):
    print(f"{name:18s} {value:.4f}")
