# framework: jax
# compare: coef; s; approx_error; dominant; H; path; jac; directional; cg_solution; quartiles

# %% [markdown]
# # JAX is also NumPy
#
# No training here: linear algebra, derivatives of any order, and a few loops on the device.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax import grad, hessian, jacfwd, jacrev, jit, jvp, lax

jax.config.update("jax_enable_x64", True)

# %% Least squares
rng = np.random.default_rng(0)
t = jnp.linspace(0, 1, 64)
A = jnp.vander(t, 4, increasing=True)
noisy = 1 - 2 * t + 3 * t**3 + 0.01 * rng.normal(size=64)
coef, residual, rank, sv = jnp.linalg.lstsq(A, noisy)
print("coefficients:", coef, "rank:", rank)

# %% Singular values and a low rank approximation
M = jnp.asarray(rng.normal(size=(20, 12)))
u, s, vt = jnp.linalg.svd(M, full_matrices=False)
approx_error = jnp.array([jnp.linalg.norm(M - (u[:, :k] * s[:k]) @ vt[:k]) for k in (1, 8)])
approx_error


# %% Power iteration with fori_loop
@jit
def power_iteration(S, num_iters=200):
    def body(_, v):
        v = S @ v
        return v / jnp.linalg.norm(v)

    v = lax.fori_loop(0, num_iters, body, jnp.ones(S.shape[0]))
    return v @ S @ v


S = M.T @ M
dominant = power_iteration(S)
print("largest eigenvalue:", dominant, "numpy:", np.linalg.eigvalsh(S)[-1])


# %% Newton's method on the Rosenbrock function
def rosenbrock(p):
    x, y = p
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


p = jnp.array([-1.2, 1.0])
hess = jit(hessian(rosenbrock))
H = hess(p)
print(H)


@jit
def newton_step(p):
    return p - jnp.linalg.solve(hess(p), grad(rosenbrock)(p))


path = [p]
for _ in range(8):
    p = newton_step(p)
    path.append(p)
path = jnp.stack(path)
print("minimum:", p)


# %% Jacobians, forward and reverse
def polar_to_cartesian(q):
    r, phi = q
    return jnp.array([r * jnp.cos(phi), r * jnp.sin(phi)])


q = jnp.array([2.0, jnp.pi / 6])
jac = jacfwd(polar_to_cartesian)(q)
print(jac, jnp.allclose(jac, jacrev(polar_to_cartesian)(q)))
_, directional = jvp(polar_to_cartesian, (q,), (jnp.array([1.0, 0.0]),))
print("along r:", directional)

# %% Conjugate gradients without a matrix
cg_solution, _ = jax.scipy.sparse.linalg.cg(lambda v: S @ v + 0.1 * v, jnp.ones(12))
print("residual:", jnp.linalg.norm(S @ cg_solution + 0.1 * cg_solution - 1))

# %% Some statistics
draws = jnp.exp(jax.random.normal(jax.random.key(8), (500,)))
quartiles = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]))
print("quartiles:", quartiles)
