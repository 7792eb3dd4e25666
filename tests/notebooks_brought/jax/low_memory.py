# framework: jax
# compare: losses; params; float(mae); master_dtype

# %% [markdown]
# # Two tricks for little memory
#
# * compute in `bfloat16`, keep the parameters in `float32`;
# * accumulate gradients over several small batches by hand before each update.

# %%
import jax
import jax.numpy as jnp
import numpy as np

# %% Data
rng = np.random.default_rng(17)
x_data = rng.uniform(-1, 1, size=(256, 4)).astype(np.float32)
y_data = (x_data[:, :1] ** 2 - x_data[:, 1:2] * x_data[:, 2:3]).astype(np.float32)


# %% Model with half precision inside
def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def forward(params, x):
    p = cast(params, jnp.bfloat16)
    h = jax.nn.relu(x.astype(jnp.bfloat16) @ p["w1"] + p["b1"])
    return (h @ p["w2"] + p["b2"]).astype(jnp.float32)


def loss_fn(params, x, y):
    return jnp.mean(jnp.square(forward(params, x) - y))


k1, k2 = jax.random.split(jax.random.PRNGKey(3))
params = {
    "w1": jax.random.normal(k1, (4, 32)) * 0.5,
    "b1": jnp.zeros(32),
    "w2": jax.random.normal(k2, (32, 1)) * 0.2,
    "b2": jnp.zeros(1),
}
print(forward(params, x_data[:2]))

# %%
grad_fn = jax.jit(jax.value_and_grad(loss_fn))


@jax.jit
def accumulate(total, grads):
    return jax.tree.map(jnp.add, total, grads)


@jax.jit
def apply_gradients(params, total, n, lr=0.1):
    return jax.tree.map(lambda p, g: p - lr * g / n, params, total)


# %% Train: 4 micro batches of 16 samples make one update
micro_batch = 16
accumulate_steps = 4
losses = []
total = jax.tree.map(jnp.zeros_like, params)

for epoch in range(5):
    running_loss = 0.0
    for k, i in enumerate(range(0, len(x_data), micro_batch)):
        loss, grads = grad_fn(params, x_data[i : i + micro_batch], y_data[i : i + micro_batch])
        total = accumulate(total, grads)
        running_loss += loss
        if (k + 1) % accumulate_steps == 0:
            params = apply_gradients(params, total, accumulate_steps)
            total = jax.tree.map(jnp.zeros_like, params)
            losses.append(running_loss / accumulate_steps)
            running_loss = 0.0
    print(f"epoch {epoch}: loss {losses[-1]:.4f}")

# %%
mae = jnp.abs(forward(params, x_data) - y_data).mean()
master_dtype = params["w1"].dtype.itemsize
print("mean absolute error:", mae, "bytes per weight:", master_dtype)
