# framework: jax
# compare: nlls; raw; mu; sigma; samples

# %% [markdown]
# # Gaussian process regression
#
# We fit the kernel parameters by gradient descent on the marginal likelihood. Cholesky likes
# double precision.

# %%
import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

# %%
rs = np.random.RandomState(4)
X = np.sort(rs.uniform(-3, 3, size=64))
Y = np.sin(2 * X) + 0.3 * X + 0.1 * rs.randn(64)
X_star = np.linspace(-4, 4, 50)


# %%
def rbf(params, a, b):
    sq = (a[:, None] - b[None, :]) ** 2
    return params["amplitude"] * jnp.exp(-0.5 * sq / params["length"] ** 2)


def constrain(raw):
    return jax.tree.map(jax.nn.softplus, raw)


@jax.jit
def nll(raw):
    p = constrain(raw)
    n = X.shape[0]
    K = rbf(p, X, X) + (p["noise"] + 1e-8) * jnp.eye(n)
    L = jnp.linalg.cholesky(K)
    alpha = jsp.linalg.cho_solve((L, True), Y)
    return 0.5 * Y @ alpha + jnp.log(jnp.diag(L)).sum() + 0.5 * n * jnp.log(2 * jnp.pi)


# %% Fit
raw = {"amplitude": jnp.array(0.5), "length": jnp.array(0.5), "noise": jnp.array(-1.0)}
opt = optax.adam(0.1)
opt_state = opt.init(raw)
nlls = []
for i in range(30):
    value, g = jax.value_and_grad(nll)(raw)
    updates, opt_state = opt.update(g, opt_state)
    raw = optax.apply_updates(raw, updates)
    nlls.append(value)
    if i % 10 == 0:
        print(i, value)
print(constrain(raw))


# %% Predict
@jax.jit
def posterior(raw, x_new):
    p = constrain(raw)
    K = rbf(p, X, X) + p["noise"] * jnp.eye(len(X))
    Ks = rbf(p, X, x_new)
    L = jnp.linalg.cholesky(K)
    mu = Ks.T @ jsp.linalg.cho_solve((L, True), Y)
    v = jsp.linalg.solve_triangular(L, Ks, lower=True)
    cov = rbf(p, x_new, x_new) - v.T @ v
    return mu, cov


mu, cov = posterior(raw, X_star)
sigma = jnp.sqrt(jnp.clip(jnp.diag(cov), 1e-12))
print("largest uncertainty at x =", X_star[sigma.argmax()])

# %% Draw functions from the posterior
L = jnp.linalg.cholesky(cov + 1e-6 * jnp.eye(len(X_star)))
eps = jax.random.normal(jax.random.PRNGKey(0), (len(X_star), 3))
samples = mu[:, None] + L @ eps
samples.shape
