# framework: jax
# compare: losses; jax.tree.leaves(params); jax.tree.leaves(counts); trained(x[:8])

# %% [markdown]
# # NNX, the functional way
#
# `nnx.split` turns a module into a static graph and a pytree of state. After that, everything is
# plain JAX: `jax.jit`, `jax.grad` and Optax.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Count(nnx.Variable):
    """Counts the calls."""


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.calls = Count(jnp.array(0))
        self.up = nnx.Linear(4, 16, rngs=rngs)
        self.down = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(jnp.tanh(self.up(x)))


# %%
model = Net(rngs=nnx.Rngs(params=3))
graphdef, params, counts = nnx.split(model, nnx.Param, Count)
jax.tree.map(jnp.shape, params)

# %%
opt = optax.sgd(0.1, nesterov=True, momentum=0.9)
opt_state = opt.init(params)


@jax.jit
def train_step(params, counts, opt_state, x, y):
    def loss_fn(params):
        model = nnx.merge(graphdef, params, counts, copy=True)
        loss = jnp.mean((model(x) - y) ** 2)
        return loss, nnx.state(model, Count)

    (loss, counts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, counts, opt_state, loss


# %%
kx, kn = jax.random.split(jax.random.key(5))
x = jax.random.uniform(kx, (128, 4), minval=-1.0, maxval=1.0)
y = jnp.stack([x[:, 0] * x[:, 1], x[:, 2] - x[:, 3]], axis=1)
y = y + 0.01 * jax.random.normal(kn, y.shape)

batch = 32
losses = []
for _epoch in range(10):
    for i in range(0, 128, batch):
        params, counts, opt_state, loss = train_step(
            params, counts, opt_state, x[i : i + batch], y[i : i + batch]
        )
        losses.append(loss)
print(losses[0], losses[-1])

# %% Back to an object
trained = nnx.merge(graphdef, params, counts)
print("the network was called", int(trained.calls[...]), "times")
trained(x[:8])
