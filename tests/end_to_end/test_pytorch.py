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
    cluster.run(
        "data = torch.utils.data.TensorDataset(torch.arange(32.0))\n"
        "stream = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)\n"
        "torch.manual_seed(3)\n"
        "expected = [float(x.mean()) for x, in stream]\n"
        "torch.manual_seed(3)",
        strategy="pjrt",
    )
    found = cluster.run(
        "loss = jnp.mean(batch[0])", step=StepOptions(data="stream"), strategy="pjrt"
    )
    assert found.loss.tolist() == json.loads(clusters.evaluate(cluster, "expected"))
