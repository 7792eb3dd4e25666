# framework: jax
# compare: values; theta; grad_norm; theta2; n_iter

# %% [markdown]
# # L-BFGS with Optax
#
# For small problems without noise a quasi-Newton method needs few steps. First a loop in Python,
# then the same with `jax.lax.while_loop`.

# %%
import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpy as np
import optax

# %% Logistic regression with an L2 penalty
rng = np.random.default_rng(11)
features = rng.standard_normal((128, 6))
beta = np.array([2.0, -1.0, 0.5, 0.0, 0.0, 1.0])
labels = (features @ beta + 0.5 * rng.standard_normal(128) > 0).astype(float)
features, labels = jnp.array(features), jnp.array(labels)
features.dtype


# %%
def objective(theta):
    logits = features @ theta["w"] + theta["c"]
    nll = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
    return nll + 0.01 * jnp.sum(theta["w"] ** 2)


theta0 = {"w": jnp.zeros(6), "c": jnp.array(0.0)}
print("start:", objective(theta0))

# %% Loop in Python, with a simple backtracking line search
linesearch = optax.scale_by_backtracking_linesearch(15, store_grad=True)
solver = optax.lbfgs(memory_size=5, linesearch=linesearch)
theta = theta0
state = solver.init(theta)
value_and_grad = optax.value_and_grad_from_state(objective)


@jax.jit
def lbfgs_step(theta, state):
    value, grad = value_and_grad(theta, state=state)
    updates, state = solver.update(grad, state, theta, value=value, grad=grad, value_fn=objective)
    return optax.apply_updates(theta, updates), state, value


values = []
for _ in range(20):
    theta, state, value = lbfgs_step(theta, state)
    values.append(value)
grad_norm = optax.tree.norm(jax.grad(objective)(theta))
print("value:", values[-1], "gradient norm:", grad_norm)

# %% [markdown]
# ## All on the device
#
# The stop test reads the gradient from the state of the solver.


# %%
def run_lbfgs(init_theta, fun, opt, max_iter, tol):
    vg = optax.value_and_grad_from_state(fun)

    def body(carry):
        theta, state = carry
        value, grad = vg(theta, state=state)
        updates, state = opt.update(grad, state, theta, value=value, grad=grad, value_fn=fun)
        return optax.apply_updates(theta, updates), state

    def keep_going(carry):
        _, state = carry
        count = optax.tree.get(state, "count")
        err = optax.tree.norm(optax.tree.get(state, "grad"))
        return (count == 0) | ((count < max_iter) & (err >= tol))

    return jax.lax.while_loop(keep_going, body, (init_theta, opt.init(init_theta)))


theta2, final_state = run_lbfgs(theta0, objective, solver, max_iter=40, tol=1e-5)
n_iter = optax.tree.get(final_state, "count")
print("iterations:", n_iter, "value:", objective(theta2))
