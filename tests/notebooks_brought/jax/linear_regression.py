# framework: jax
# compare: losses; w; b; predict(w, b, x_new)

# %% [markdown]
# # Linear regression from scratch
#
# No library for neural networks here: only `jax.numpy` and `jax.grad`.

# %%
import jax
import jax.numpy as jnp
import numpy as np

# %% Some noisy data
rng = np.random.default_rng(42)
true_w = np.array([1.5, -2.0, 0.7])
x = rng.normal(size=(128, 3)).astype(np.float32)
y = (x @ true_w + 0.3 + 0.05 * rng.normal(size=128)).astype(np.float32)
x = jnp.asarray(x)
y = jnp.asarray(y)
print(x.shape, y.shape)


# %%
def predict(w, b, x):
    return jnp.dot(x, w) + b


def mse(w, b):
    return jnp.mean((predict(w, b, x) - y) ** 2)


# %% [markdown]
# `jax.grad` takes the derivative for the first argument, unless we say otherwise with `argnums`.

# %%
w = jnp.zeros(3)
b = 0.0
print("loss before:", mse(w, b))
print("gradient:", jax.grad(mse)(w, b))

# %% Gradient descent
learning_rate = 0.1
losses = []
for i in range(60):
    dw, db = jax.grad(mse, argnums=(0, 1))(w, b)
    w = w - learning_rate * dw
    b = b - learning_rate * db
    losses.append(mse(w, b))
    if i % 10 == 0:
        print(f"step {i:3d}  loss {losses[-1]:.5f}")

# %%
x_new = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
print("w =", w, " b =", b)
print("true w =", true_w)
predict(w, b, x_new)
