# framework: jax
# compare: losses; nnx.to_pure_dict(nnx.state(model, nnx.Param)); model(x_grid); test_loss

# %% [markdown]
# # Flax NNX in five minutes

# %%
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


# %%
class Model(nnx.Module):
    def __init__(self, din, dmid, dout, rngs: nnx.Rngs):
        self.linear = nnx.Linear(din, dmid, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(dmid, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.linear_out = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.dropout(self.bn(self.linear(x))))
        return self.linear_out(x)


model = Model(2, 32, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
nnx.display(model)


# %%
@nnx.jit  # automatic state management
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        y_pred = model(x)
        return ((y_pred - y) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)  # in place
    return loss


# %% [markdown]
# The data is a parabola. Each step draws its own minibatch.

# %%
t = np.linspace(0, 1, 128, dtype=np.float32)[:, None]
X = np.concatenate([t, np.sin(3 * t)], axis=1)
Y = 0.8 * t**2 + 0.1
rng = np.random.default_rng(0)

losses = []
for step in range(80):
    idx = rng.choice(len(X), size=32)
    loss = train_step(model, optimizer, X[idx], Y[idx])
    losses.append(float(loss))
    if step % 20 == 0:
        print(step, losses[-1])

# %% Evaluation
model.eval()
t_grid = jnp.linspace(0, 1, 9)[:, None]
x_grid = jnp.concatenate([t_grid, jnp.sin(3 * t_grid)], axis=1)
test_loss = jnp.mean((model(X) - Y) ** 2)
print("test loss:", test_loss)
