# framework: jax
# compare: metrics_history; nnx.to_pure_dict(nnx.state(model, nnx.Param)); predictions

# %% [markdown]
# # Classify small pictures with Flax NNX
#
# With an input pipeline by `tf.data`, a CNN, metrics, and an evaluation every few steps.

# %%
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from flax import nnx

# %% Data: horizontal, vertical or diagonal strokes
tf.random.set_seed(0)
train_steps, eval_every, batch_size = 40, 20, 16


def make_pictures(n, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    image = 0.2 * rng.normal(size=(n, 8, 8, 1))
    for k in range(n):
        where = rng.integers(1, 7)
        if label[k] == 0:
            image[k, where, :, 0] += 1.0
        elif label[k] == 1:
            image[k, :, where, 0] += 1.0
        else:
            image[k, np.arange(8), np.arange(8), 0] += 1.0
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


train_ds = tf.data.Dataset.from_tensor_slices(make_pictures(256, 0))
test_ds = tf.data.Dataset.from_tensor_slices(make_pictures(64, 1))

train_ds = train_ds.repeat().shuffle(128, seed=4)
train_ds = train_ds.batch(batch_size, drop_remainder=True).take(train_steps).prefetch(1)
test_ds = test_ds.batch(batch_size, drop_remainder=True).prefetch(1)


# %% Model
class CNN(nnx.Module):
    """A simple CNN model."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(128, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.conv(x)))
        x = x.reshape(x.shape[0], -1)  # flatten
        x = nnx.relu(self.linear1(x))
        return self.linear2(x)


model = CNN(rngs=nnx.Rngs(0))
y = model(jnp.ones((1, 8, 8, 1)))
y

# %%
optimizer = nnx.Optimizer(model, optax.adamw(0.01, 0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(),
    loss=nnx.metrics.Average("loss"),
)


# %% Steps
def loss_fn(model: CNN, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
    ).mean()
    return loss, logits


@nnx.jit
def train_step(model: CNN, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model: CNN, metrics: nnx.MultiMetric, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


# %% Train and evaluate
metrics_history = {
    "train_loss": [],
    "train_accuracy": [],
    "test_loss": [],
    "test_accuracy": [],
}

for step, batch in enumerate(train_ds.as_numpy_iterator()):
    train_step(model, optimizer, metrics, batch)

    if step > 0 and (step % eval_every == 0 or step == train_steps - 1):
        for metric, value in metrics.compute().items():
            metrics_history[f"train_{metric}"].append(value)
        metrics.reset()

        for test_batch in test_ds.as_numpy_iterator():
            eval_step(model, metrics, test_batch)
        for metric, value in metrics.compute().items():
            metrics_history[f"test_{metric}"].append(value)
        metrics.reset()
        print(step, {name: float(values[-1]) for name, values in metrics_history.items()})


# %% Look at some predictions
@nnx.jit
def pred_step(model: CNN, batch):
    return model(batch["image"]).argmax(axis=1)


test_batch = next(test_ds.as_numpy_iterator())
predictions = pred_step(model, test_batch)
print(predictions, test_batch["label"])
