# framework: jax
# compare: history; state.params; state.batch_stats; eval_metrics

# %% [markdown]
# # Batch normalization in Flax Linen
#
# Batch statistics are a second collection of variables. The training step asks for them with
# `mutable=["batch_stats"]` and stores the result in its own `TrainState`.

# %%
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


# %%
class MLP(nn.Module):
    num_classes: int = 4

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(features=32, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        return nn.Dense(features=self.num_classes)(x)


mlp = MLP()
x = jnp.ones((1, 12))
variables = mlp.init(jax.random.key(0), x, train=False)
params = variables["params"]
batch_stats = variables["batch_stats"]

jax.tree_util.tree_map(jnp.shape, variables)


# %%
class TrainState(train_state.TrainState):
    batch_stats: Any


state = TrainState.create(
    apply_fn=mlp.apply,
    params=params,
    batch_stats=batch_stats,
    tx=optax.adam(1e-2),
)


@jax.jit
def train_step(state: TrainState, batch):
    """Train for a single step."""

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            x=batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(
            logits=logits, labels=batch["label"]
        ).mean()
        return loss, (logits, updates)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, updates)), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads)
    state = state.replace(batch_stats=updates["batch_stats"])
    metrics = {
        "loss": loss,
        "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"]),
    }
    return state, metrics


@jax.jit
def eval_step(state: TrainState, batch):
    logits = state.apply_fn(
        {"params": state.params, "batch_stats": state.batch_stats},
        x=batch["image"],
        train=False,
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
    ).mean()
    return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"])}


# %% Data: four shifted clouds
rng = np.random.default_rng(0)
label = rng.integers(0, 4, size=320)
image = 5.0 + 3.0 * rng.normal(size=(320, 12)) + 4.0 * rng.normal(size=(4, 12))[label]
train_ds = {"image": image[:256].astype(np.float32), "label": label[:256]}
test_ds = {"image": image[256:].astype(np.float32), "label": label[256:]}


# %%
def batches(ds, batch_size):
    for i in range(0, len(ds["label"]), batch_size):
        yield {name: array[i : i + batch_size] for name, array in ds.items()}


history = {"loss": [], "accuracy": []}
for epoch in range(4):
    for step, batch in enumerate(batches(train_ds, 32)):
        state, metrics = train_step(state, batch)
        for name, value in metrics.items():
            history[name].append(float(value))
        if step % 4 == 0:
            print(f"epoch {epoch} step {step}: loss {metrics['loss']:.4f}")

# %%
eval_metrics = eval_step(state, test_ds)
print({name: float(value) for name, value in eval_metrics.items()})
