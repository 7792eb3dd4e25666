"""Random numbers and loaders of PyTorch in cells, equal on all workers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

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
