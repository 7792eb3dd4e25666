# framework: jax
# compare: history; params; solution

# %% [markdown]
# # A physics-informed network for a damped oscillator
#
# The loss is the residual of `u'' + c u' + k u = 0` in random points, with second derivatives by
# `jax.grad` of `jax.grad`, and the initial conditions.

# %%
import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)

C, K = 0.4, 4.0


# %%
def init_params(key, width=16):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "w1": jax.random.normal(k1, (1, width)),
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(k2, (width, width)) / width**0.5,
        "b2": jnp.zeros(width),
        "w3": jax.random.normal(k3, (width, 1)) / width**0.5,
    }


def u(params, t):
    h = jnp.tanh(t * params["w1"][0] + params["b1"])
    h = jnp.tanh(h @ params["w2"] + params["b2"])
    return (h @ params["w3"])[0]


u_t = jax.grad(u, argnums=1)
u_tt = jax.grad(u_t, argnums=1)


def residual(params, t):
    return u_tt(params, t) + C * u_t(params, t) + K * u(params, t)


@jax.jit
def loss_fn(params, points):
    physics = jnp.mean(jax.vmap(residual, (None, 0))(params, points) ** 2)
    start = (u(params, 0.0) - 1.0) ** 2 + u_t(params, 0.0) ** 2
    return physics + 10.0 * start


# %%
key = jax.random.key(7)
key, init_key = jax.random.split(key)
params = init_params(init_key)
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 80))
opt_state = optimizer.init(params)
history = []

for epoch in range(80):
    key, subkey = jax.random.split(key)
    points = jax.random.uniform(subkey, (64,), minval=0.0, maxval=3.0)
    loss, grads = jax.value_and_grad(loss_fn)(params, points)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    history.append(loss.item())
    if epoch % 20 == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")

# %%
grid = jnp.linspace(0.0, 3.0, 7)
solution = jax.vmap(u, (None, 0))(params, grid)
print(solution)
