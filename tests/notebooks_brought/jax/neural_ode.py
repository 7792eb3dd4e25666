# framework: jax
# compare: losses; params; forecast

# %% [markdown]
# # A neural ODE for spirals
#
# `jax.experimental.ode.odeint` integrates a network. Its gradient uses the adjoint method.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint

jax.config.update("jax_enable_x64", True)

# %% Trajectories of a spiral from several points
true_a = jnp.array([[-0.1, 2.0], [-2.0, -0.1]])
t = jnp.linspace(0.0, 1.0, 8)
starts = np.random.default_rng(5).uniform(-2, 2, (32, 2))


def solve_true(y0):
    return odeint(lambda y, t: (y**3) @ true_a * 0.1, y0, t)


trajectories = np.asarray(jax.vmap(solve_true)(starts))
trajectories.shape


# %%
def dynamics(y, t, params):
    h = jnp.tanh(y**3 @ params["w1"] + params["b1"])
    return h @ params["w2"] + params["b2"]


def init(key, hidden=12):
    k1, k2 = jax.random.split(key)
    return {
        "w1": 0.1 * jax.random.normal(k1, (2, hidden)),
        "b1": jnp.zeros(hidden),
        "w2": 0.1 * jax.random.normal(k2, (hidden, 2)),
        "b2": jnp.zeros(2),
    }


def loss_fn(params, y0, true_y):
    pred = jax.vmap(lambda y: odeint(dynamics, y, t, params, rtol=1e-6, atol=1e-8))(y0)
    return jnp.mean(jnp.abs(pred - true_y) ** 2)


# %% Training on shuffled batches
def get_batches(rng, batch_size=8):
    order = rng.permutation(len(trajectories))
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        yield trajectories[rows, 0], trajectories[rows]


params = init(jax.random.PRNGKey(1))
tx = optax.rmsprop(5e-3)
opt_state = tx.init(params)


@jax.jit
def make_step(params, opt_state, y0, true_y):
    loss, grads = jax.value_and_grad(loss_fn)(params, y0, true_y)
    updates, opt_state = tx.update(grads, opt_state)
    return loss, optax.apply_updates(params, updates), opt_state


rng = np.random.default_rng(0)
losses = []
for epoch in range(4):
    for y0, true_y in get_batches(rng):
        loss, params, opt_state = make_step(params, opt_state, y0, true_y)
        losses.append(float(loss))
    print(f"epoch {epoch}: {np.mean(losses[-4:]):.5f}")

# %%
forecast = odeint(dynamics, jnp.array([1.0, -1.0]), t, params)
print(forecast[-1])
