"""Random numbers and loaders of PyTorch in cells, equal on all workers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        running.run("import torch, jax.numpy as jnp, numpy as np", strategy="pjrt")
        yield running


def test_generator_is_seeded_alike(cluster: nbdist.Cluster) -> None:
    first, second = (clusters.evaluate(cluster, "torch.rand(2).tolist()") for _ in range(2))
    assert first != second
    cells = [clusters.evaluate(cluster, "torch.initial_seed()") for _ in range(2)]
    assert len(set(cells)) == 1


def test_ranks_that_draw_differently_are_aligned(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("_ = torch.rand(rank + 1)", strategy="pjrt")
    clusters.evaluate(cluster, "torch.rand(2).tolist()")
    shown = capsys.readouterr()
    assert "PyTorch" in shown.out + shown.err


def test_shuffled_loader_without_a_seed(cluster: nbdist.Cluster) -> None:
    """Workers read their own rows, the first batch, the first sample, and two samples on trial."""
    cluster.run(
        "read = []\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 32\n"
        "    def __getitem__(self, number):\n"
        "        read.append(number)\n"
        "        return torch.tensor(float(number)),\n"
        "stream = torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True)\n"
        "torch.manual_seed(3)\n"
        "expected = [float(x.mean()) for _ in range(2) for x, in stream]\n"
        "torch.manual_seed(3)\n"
        "read.clear()",
        strategy="pjrt",
    )
    step = StepOptions(data="stream", epochs=2)
    found = cluster.run("loss = jnp.mean(batch[0])", step=step, strategy="pjrt")
    assert found.loss.tolist() == json.loads(clusters.evaluate(cluster, "expected"))
    read = [len(objects["read"]) for objects in cluster.pull(["read"]).values()]
    assert read == [2 + 1 + 2 * 32 // len(read) + 8] * len(read)


LOADER = """
import jax
read, losses = [], []
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 37
    def __getitem__(self, number):
        read.append(number)
        x = torch.arange(12, dtype=torch.uint8).reshape(3, 4) * 5 + number
        return self.sample(x, int(x.sum()) % 7)
    def sample(self, x, y):
        return x, y
class Named(Rows):
    def sample(self, x, y):
        return {"image": x, "label": np.float32(y)}
class Noisy(Rows):
    def sample(self, x, y):
        return x + torch.randint(3, x.shape, dtype=torch.uint8), y
class Padded(torch.utils.data.DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x - x.min(), y

def loss_fn(w, x, y):
    return jnp.mean((x @ w - y) ** 2)

@jax.jit
def train_step(w, x, y):
    loss, gradient = jax.value_and_grad(loss_fn)(w, x, y)
    return w - 0.01 * gradient, loss

w = jnp.zeros(12)
torch.manual_seed(3)
rows, loader = Rows(), torch.utils.data.DataLoader
"""
LOOPS = {
    "numbers and tensors": """
stream = loader(rows, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in stream:
        x = (x / 255.0).numpy().reshape(x.shape[0], -1)
        w, loss = train_step(w, jnp.array(x), jnp.asarray(y))
        losses.append(float(loss))
""",
    "sizes of tensors": """
stream = loader(rows, batch_size=8, shuffle=True, num_workers=0)
for epoch in range(2):
    for batch in stream:
        x, y = batch
        x = x.float().permute(0, 2, 1).detach().cpu().numpy() / 255.0
        w, loss = train_step(w, x.reshape(y.size(0), -1), y.numpy())
        losses.append(loss.item())
""",
    "loader of arrays": """
from jax.tree_util import tree_map
from torch.utils.data import DataLoader, default_collate
def numpy_collate(batch):
    return tree_map(np.asarray, default_collate(batch))
class NumpyLoader(DataLoader):
    def __init__(self, dataset, **options):
        super().__init__(dataset, collate_fn=numpy_collate, **options)
stream = NumpyLoader(rows, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in stream:
        x = x.astype(np.float32).reshape(len(x), -1) / 255.0
        w, loss = train_step(w, x, y)
        losses.append(loss.item())
""",
    "dicts": """
stream = loader(Named(), batch_size=8, shuffle=True)
for epoch in range(2):
    for batch in stream:
        batch = {name: jnp.asarray(part) for name, part in batch.items()}
        x = batch["image"].reshape(len(batch["image"]), -1) / 255.0
        w, loss = train_step(w, x, batch["label"])
        losses.append(loss.item())
""",
}
WHOLE = {
    "random samples": LOOPS["numbers and tensors"].replace("(rows,", "(Noisy(),"),
    "own iterator": LOOPS["numbers and tensors"].replace("loader(rows,", "Padded(rows,"),
    "own collate function": LOOPS["numbers and tensors"].replace(
        "shuffle=True",
        "shuffle=True, collate_fn=lambda rows: (torch.stack([r[0] for r in rows]),"
        " torch.tensor([sum(r[1] for r in rows)] * len(rows)))",
    ),
    "axes of tensors": LOOPS["numbers and tensors"].replace(
        "(x / 255.0)", "(x.transpose(0, 1).transpose(0, 1) / 255.0)"
    ),
    "step that converts": """
def converting(w, x, y):
    return train_step(w, jnp.asarray(x.numpy()).reshape(-1, 12) / 255, y.numpy())
for x, y in loader(rows, batch_size=8, shuffle=True):
    w, loss = converting(w, x, y)
    losses.append(float(loss))
""",
}


def alone(*cells: str) -> dict[str, Any]:
    """Return the values of this process, without nbdist."""
    namespace: dict[str, Any] = {}
    for cell in ("import torch, jax.numpy as jnp, numpy as np", *cells):
        exec(cell, namespace)
    return namespace


def check(cluster: nbdist.Cluster, loop: str) -> list[int]:
    """Compare losses with those of one process, and return the number of reads of each rank."""
    cluster.run(LOADER, strategy="pjrt")
    cluster.run(loop, strategy="pjrt")
    expected = alone(LOADER, loop)
    every = cluster.pull(["losses", "read"]).values()
    for found in every:
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    return [len(found["read"]) for found in every]


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_over_loaders(
    cluster: nbdist.Cluster, loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers read their rows, the last batch of 5, the first sample, and two on trial."""
    reads = check(cluster, LOOPS[loop])
    assert "by row: each worker reads its own rows only" in capsys.readouterr().out
    assert reads == [2 * (32 // len(reads) + 5 + 1) + 2 + 8] * len(reads)


@pytest.mark.parametrize("loop", WHOLE)
def test_loops_over_loaders_that_need_whole_batches(
    cluster: nbdist.Cluster, loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(cluster, WHOLE[loop])
    assert "by row" not in capsys.readouterr().out
