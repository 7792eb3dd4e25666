"""Pending collectives of a failed cell never match those of a later cell."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from tests import clusters
from tests.operations import TOTAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS = 2
BOUND_S = 20.0
SETUP = "import time\nimport numpy as np, tensorflow as tf, jax, jax.numpy as jnp\n"
LARGE = """
rows = jax.NamedSharding(mesh, jax.P('data'))
many = jax.make_array_from_process_local_data(rows, np.ones((1, 1 << 20), np.float32))
summed = jax.jit(lambda a: jnp.cumsum(a, axis=1).sum(0), out_shardings=jax.P())
"""

TAKE_KEYS = """
if rank == 0:
    for keys in strategy.extended._collective_keys._instance_key_table.values():
        for device in keys:
            keys[device] += 1
"""
"""Take keys on rank 0 as a function does that fails before its collective."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=RANKS) as running:
        running.run(SETUP, strategy="mirrored")
        yield running


def check_total(cluster: nbdist.Cluster, strategy: str) -> None:
    with clusters.bounded(BOUND_S):
        run = cluster.run(TOTAL[strategy], strategy=strategy)
    assert run.results == dict.fromkeys(range(RANKS), f"{RANKS:.1f}")


@pytest.mark.parametrize("bad_rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_pending_eager_collective_is_not_joined_later(
    cluster: nbdist.Cluster, bad_rank: int
) -> None:
    """TensorFlow runs eager replicas in separate threads that stay in the collective."""
    collective = TOTAL["mirrored"].replace("tf.ones(())", "5 * tf.ones(())")
    with pytest.raises(nbdist.CellError, match=f"TypeError on rank {bad_rank}@"):
        cluster.run(f"if rank == {bad_rank}: raise TypeError\n{collective}", strategy="mirrored")
    check_total(cluster, "mirrored")


@pytest.mark.parametrize("ranks", [None, pytest.param("0", marks=pytest.mark.full)])
def test_different_collective_keys_are_repaired(cluster: nbdist.Cluster, ranks: str | None) -> None:
    """The cell succeeds, but without a repair the next collective would hang."""
    cluster.run(TAKE_KEYS, strategy="mirrored" if ranks is None else None, ranks=ranks)
    check_total(cluster, "mirrored")


def test_pending_jax_collective_is_not_joined_later(
    cluster: nbdist.Cluster,
) -> None:
    cluster.run(LARGE, strategy="pjrt")
    with pytest.raises(nbdist.CellError, match="TypeError on rank 1@"):
        cluster.run("if rank == 1: raise TypeError\ndone = summed(many)", strategy="pjrt")
    check_total(cluster, "pjrt")


@pytest.mark.parametrize(
    "phase",
    [
        "build_pjrt",
        pytest.param("leave_pjrt", marks=pytest.mark.full),
        pytest.param("put_back_pjrt", marks=pytest.mark.full),
    ],
)
def test_interrupt_during_the_repair_loses_no_array(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    cluster.run(f"{LARGE}\ndone, kept = 0, jnp.arange(3.0)", strategy="pjrt")
    with pytest.raises(nbdist.CellError, match="TypeError on rank 1@"):
        cluster.run("if rank == 1: raise TypeError\ndone = summed(many)", strategy="pjrt")
    apply = cluster._worker_group.engines.apply

    def interrupted(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        results = apply(function, *args, **options)
        if function.__name__ == phase:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return results

    monkeypatch.setattr(cluster._worker_group.engines, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.run("rank", strategy="pjrt")
    run = cluster.run("kept.tolist(), float(many.sum())", strategy="pjrt")
    assert set(run.results.values()) == {f"([0.0, 1.0, 2.0], {RANKS * 2.0**20})"}
