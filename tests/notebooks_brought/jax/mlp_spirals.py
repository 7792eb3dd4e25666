# framework: jax
# compare: log; params; train_acc; test_acc

# %% [markdown]
# # An MLP on two spirals
#
# The parameters are a list of dictionaries, and the update is one jitted function.

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import grad, jit, random, vmap

# %% [markdown]
# ## Hyperparameters

# %%
layer_sizes = [2, 32, 32, 2]
step_size = 0.1
num_epochs = 8
batch_size = 32


# %%
def spirals(n, seed):
    rs = np.random.RandomState(seed)
    labels = np.arange(n) % 2
    t = 2.5 * np.sqrt(rs.rand(n))
    angle = 2.0 * t + np.pi * labels
    points = np.stack([t * np.cos(angle), t * np.sin(angle)], axis=1)
    points = points + 0.05 * rs.randn(n, 2)
    return points.astype("float32"), np.eye(2, dtype="float32")[labels]


train_images, train_labels = spirals(300, 0)
test_images, test_labels = spirals(100, 1)


# %%
def random_layer_params(m, n, key, scale=0.5):
    w_key, b_key = random.split(key)
    return {
        "weights": scale * random.normal(w_key, (m, n)),
        "biases": 0.1 * random.normal(b_key, (n,)),
    }


def init_network_params(sizes, key):
    keys = random.split(key, len(sizes) - 1)
    return [random_layer_params(*mn, k) for *mn, k in zip(sizes[:-1], sizes[1:], keys, strict=True)]


params = init_network_params(layer_sizes, random.key(0))
jax.tree.map(jnp.shape, params)

# %% [markdown]
# Write the prediction for **one** sample and let `vmap` do the batch.


# %%
def predict(params, point):
    activations = point
    *hidden, last = params
    for layer in hidden:
        activations = jnp.tanh(activations @ layer["weights"] + layer["biases"])
    logits = activations @ last["weights"] + last["biases"]
    return logits - jax.nn.logsumexp(logits)


batched_predict = vmap(predict, in_axes=(None, 0))


@jit
def accuracy(params, images, targets):
    target_class = jnp.argmax(targets, axis=1)
    predicted_class = jnp.argmax(batched_predict(params, images), axis=1)
    return jnp.mean(predicted_class == target_class)


@jit
def loss(params, images, targets):
    return -jnp.mean(jnp.sum(batched_predict(params, images) * targets, axis=1))


@jit
def update(params, x, y):
    grads = grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - step_size * g, params, grads)


# %% [markdown]
# The last batch of an epoch is smaller: 300 is not a multiple of 32.


# %%
def get_train_batches(batch_size):
    for start in range(0, len(train_images), batch_size):
        yield train_images[start : start + batch_size], train_labels[start : start + batch_size]


# %%
log = []
for epoch in range(num_epochs):
    start_time = time.time()
    for x, y in get_train_batches(batch_size):
        params = update(params, x, y)
    epoch_time = time.time() - start_time

    train_loss = loss(params, train_images, train_labels)
    log.append(float(train_loss))
    print(f"Epoch {epoch} in {epoch_time:0.2f} sec, loss {train_loss:.4f}")

# %% Evaluation
train_acc = accuracy(params, train_images, train_labels)
test_acc = accuracy(params, test_images, test_labels)
print(f"Training set accuracy {train_acc}")
print(f"Test set accuracy {test_acc}")
