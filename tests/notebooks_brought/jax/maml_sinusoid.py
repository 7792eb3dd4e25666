# framework: jax
# compare: losses; params; adapted

# %% [markdown]
# # Model-agnostic meta-learning of sine waves
#
# The outer gradient goes through one inner step of each task. `jax.vmap` runs all tasks of a batch.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax

ALPHA = 0.05

# %% Tasks: sine waves with other amplitudes and phases
rng = np.random.default_rng(3)


def sample_tasks(outer_batch_size, inner_batch_size=10):
    amplitude = rng.uniform(0.5, 3.0, (outer_batch_size, 1, 1))
    phase = rng.uniform(0.0, np.pi, (outer_batch_size, 1, 1))
    x = rng.uniform(-5.0, 5.0, (2, outer_batch_size, inner_batch_size, 1))
    y = amplitude * np.sin(x + phase)
    return [a.astype(np.float32) for a in (x[0], y[0], x[1], y[1])]


# %% A network as a list of weights
def init_network(key, sizes=(1, 24, 24, 1)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (m, n)) / np.sqrt(m), jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:])
    ]


def net_apply(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss(params, inputs, targets):
    return jnp.mean((targets - net_apply(params, inputs)) ** 2)


def inner_update(params, x1, y1):
    grads = jax.grad(loss)(params, x1, y1)
    return jax.tree.map(lambda p, g: p - ALPHA * g, params, grads)


def maml_loss(params, x1, y1, x2, y2):
    return loss(inner_update(params, x1, y1), x2, y2)


def batch_maml_loss(params, x1, y1, x2, y2):
    task_losses = jax.vmap(maml_loss, in_axes=(None, 0, 0, 0, 0))(params, x1, y1, x2, y2)
    return jnp.mean(task_losses)


# %% Meta-training
opt = optax.adam(2e-3)
params = init_network(jax.random.PRNGKey(0))
opt_state = opt.init(params)


@jax.jit
def step(params, opt_state, x1, y1, x2, y2):
    value, grads = jax.value_and_grad(batch_maml_loss)(params, x1, y1, x2, y2)
    updates, opt_state = opt.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


losses = []
for i in range(60):
    x1, y1, x2, y2 = sample_tasks(outer_batch_size=8)
    params, opt_state, value = step(params, opt_state, x1, y1, x2, y2)
    losses.append(float(value))
    if i % 20 == 0:
        print(i, losses[-1])

# %% Adapt to a new task
x1, y1, x2, y2 = (a[0] for a in sample_tasks(1))
adapted = [float(loss(params, x2, y2))]
tuned = params
for _ in range(3):
    tuned = inner_update(tuned, x1, y1)
    adapted.append(float(loss(tuned, x2, y2)))
print(adapted)
