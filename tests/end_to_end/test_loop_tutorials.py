"""Training loops of JAX as tutorials write them, on batches that they convert for their step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

SAMPLES, BATCH = 69, 16
FULL, LAST = divmod(SAMPLES, BATCH)

IMAGES = f"""
import numpy as np
rng = np.random.default_rng(0)
images = rng.integers(0, 256, ({SAMPLES}, 8, 8)).astype(np.uint8)
labels = (images.mean((1, 2)) > 127).astype(np.int64) + 2 * (images[:, 0, 0] > 127)
read = []
"""

FLAX = (
    """
import datasets, jax, jax.numpy as jnp, optax
from flax import nnx
train_ds = datasets.Dataset.from_dict({"image": images, "label": labels}).with_format("numpy")
class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.linear = nnx.Linear(4 * 16, 4, rngs=rngs)
    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv(x)), window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))
model = CNN(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(0.01, 0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
    ).mean()
    return loss, logits
@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
history = []
""",
    """
for epoch in range(2):
    for step, batch in enumerate(train_ds.shuffle(seed=epoch).iter(batch_size=16)):
        batch = {
            "image": jnp.asarray(batch["image"], dtype=jnp.float32)[..., None] / 255.0,
            "label": jnp.asarray(batch["label"]),
        }
        train_step(model, optimizer, metrics, batch)
    for name, value in metrics.compute().items():
        history.append(float(value))
    metrics.reset()
""",
)

EQUINOX = (
    """
import equinox as eqx, grain, jax, jax.numpy as jnp, optax
class Source:
    def __len__(self):
        return len(images)
    def __getitem__(self, number):
        read.append(int(number))
        return images[number], labels[number]
trainloader = grain.MapDataset.source(Source()).seed(1).shuffle().batch(16)
model = eqx.nn.MLP(64, 4, 32, 2, key=jax.random.key(0))
optim = optax.sgd(0.1, momentum=0.9)
opt_state = optim.init(eqx.filter(model, eqx.is_array))
history = []
""",
    """
@eqx.filter_jit
def make_step(model, opt_state, x, y):
    def loss(model):
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy(logits, y).mean()
    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, opt_state = optim.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, value

def train(model, opt_state, epochs):
    for epoch in range(epochs):
        for x, y in trainloader:
            x = (x.astype(np.float32) / 255.0 - 0.5) / 0.25
            x = jnp.array(x).reshape(x.shape[0], -1)
            y = jax.nn.one_hot(y, 4)
            model, opt_state, train_loss = make_step(model, opt_state, x, y)
            history.append(float(train_loss))
    return model

model = train(model, opt_state, 2)
""",
)

OPTAX = (
    """
import grain, jax, jax.numpy as jnp, optax
class Source:
    def __len__(self):
        return len(images)
    def __getitem__(self, number):
        read.append(int(number))
        return {"x": images[number], "label": np.int32(labels[number])}
sampler = grain.samplers.IndexSampler(len(images), shuffle=True, seed=3, num_epochs=1)
loader = grain.DataLoader(
    data_source=Source(), sampler=sampler, operations=[grain.transforms.Batch(16)]
)
params = {"w": jnp.zeros((64, 4)), "b": jnp.zeros(4)}
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
history = []
""",
    """
opt_state = tx.init(params)

def loss_fn(params, x, y):
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

for epoch in range(2):
    for batch in loader:
        params, opt_state, loss = update(
            params,
            opt_state,
            jnp.asarray(batch["x"], jnp.float32).reshape(len(batch["x"]), -1) / 255.0,
            jnp.asarray(batch["label"]),
        )
        history.append(loss.item())
""",
)

PROGRAMS = {"flax": FLAX, "equinox": EQUINOX, "optax": OPTAX}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_of_tutorials(
    cluster: nbdist.Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = IMAGES, *PROGRAMS[name]
    expected: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, expected)
        cluster.run(cell, strategy="pjrt")
    assert "by row: each worker reads its own rows only" in capsys.readouterr().out
    every = [*cluster.pull(["history", "read"]).values()]
    for found in every:
        np.testing.assert_allclose(found["history"], expected["history"], rtol=2e-5)
        if name != "flax":  # Hugging Face does not show which rows it reads
            own = FULL * BATCH // len(every) + LAST + 1  # and on trial
            assert len(found["read"]) == 2 * own + 3 + BATCH
