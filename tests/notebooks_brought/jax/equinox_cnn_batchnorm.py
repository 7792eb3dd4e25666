# framework: jax
# compare: losses; jax.tree.leaves(eqx.filter(model, eqx.is_array)); test_acc; probs

# %% [markdown]
# # A convolutional network with batch norm in Equinox
#
# The running statistics live in a separate `State` object, which goes in and comes out of each
# call. Inside, the model sees one picture; `jax.vmap` adds the batch axis and gives it a name, so
# that batch norm can average over it.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

# %% Parameters of this run
BATCH_SIZE = 32
LEARNING_RATE = 5e-3
EPOCHS = 4
SEED = 5678


# %% Synthetic pictures: is the bright spot left or right, up or down?
def make_spots(seed, n):
    rng = np.random.default_rng(seed)
    pos = rng.uniform(1.0, 7.0, size=(n, 2))
    grid = np.arange(8.0)
    bump = np.exp(-((grid - pos[..., None]) ** 2) / 2.0)
    pictures = bump[:, 0, :, None] * bump[:, 1, None, :]
    pictures = pictures + 0.1 * rng.normal(size=pictures.shape)
    labels = 2 * (pos[:, 0] > 4.0) + (pos[:, 1] > 4.0)
    return pictures[:, None].astype(np.float32), labels


x_train, y_train = make_spots(0, 256)
x_test, y_test = make_spots(1, 64)
model_key, loader_key = jr.split(jr.key(SEED))
x_train.shape, y_train.shape


# %%
def dataloader(arrays, batch_size, *, key):
    """One epoch in random order."""
    dataset_size = arrays[0].shape[0]
    perm = np.asarray(jr.permutation(key, dataset_size))
    start, end = 0, batch_size
    while end <= dataset_size:
        batch_perm = perm[start:end]
        yield tuple(array[batch_perm] for array in arrays)
        start, end = end, end + batch_size


# %%
class CNN(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.MaxPool2d
    linear: eqx.nn.Linear

    def __init__(self, key):
        key1, key2 = jr.split(key)
        self.conv = eqx.nn.Conv2d(1, 4, kernel_size=3, padding=1, use_bias=False, key=key1)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        self.pool = eqx.nn.MaxPool2d(kernel_size=2, stride=2)
        self.linear = eqx.nn.Linear(4 * 4 * 4, 4, key=key2)

    def __call__(self, x, state):
        x = self.conv(x)
        x, state = self.norm(x, state)
        x = self.pool(jax.nn.relu(x))
        return self.linear(jnp.ravel(x)), state


model, state = eqx.nn.make_with_state(CNN)(model_key)
print(model)


# %%
def compute_loss(model, state, xs, ys):
    batch_model = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = batch_model(xs, state)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()
    return loss, state


@eqx.filter_jit
def make_step(model, state, opt_state, xs, ys):
    grads_fn = eqx.filter_value_and_grad(compute_loss, has_aux=True)
    (loss, state), grads = grads_fn(model, state, xs, ys)
    updates, opt_state = optim.update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    return model, state, opt_state, loss


# %%
optim = optax.adam(LEARNING_RATE)
opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

losses = []
for epoch in range(EPOCHS):
    epoch_key = jr.fold_in(loader_key, epoch)
    for xs, ys in dataloader((x_train, y_train), BATCH_SIZE, key=epoch_key):
        model, state, opt_state, loss = make_step(model, state, opt_state, xs, ys)
        losses.append(loss.item())
    print(f"epoch={epoch}, loss={losses[-1]:.4f}")

# %% Inference mode uses the running statistics
inference_model = eqx.nn.inference_mode(model)
inference_model = eqx.Partial(inference_model, state=state)


@eqx.filter_jit
def evaluate(model, x):
    logits, _ = jax.vmap(model)(x)
    return logits


logits = evaluate(inference_model, x_test)
probs = jax.nn.softmax(logits)
test_acc = jnp.mean(probs.argmax(axis=1) == y_test)
print("test accuracy:", test_acc)
