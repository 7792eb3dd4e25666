"""Six models train on 1, 2 and 4 workers with the numbers of a plain loop on one device.

All combinations of models, optimizers, strategies and workers would take minutes. A Latin square
assigns the optimizers, so every model runs with every number of workers and with every optimizer
under both strategies. In float32, every model runs on two workers.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import StepOptions
from tests import clusters, models
from tests.references import Outcome, Training, by_hand, reported

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

SIZES = [1, 2, 4]
PARAMS = [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
OPTIMIZERS = list(models.TF_OPTIMIZERS)
QUICK = {"mirrored": ("cnn",), "pjrt": ("lstm",)}
"""Models of `make test` under each strategy: batch statistics, and a loop over time."""

MODELS = pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=() if name in quick else pytest.mark.full)
        for strategy, quick in QUICK.items()
        for name in models.NAMES
    ],
)


@pytest.fixture(scope="module", params=PARAMS)
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param) as running:
        yield running


def optimizer_of(name: str, workers: int) -> str:
    return OPTIMIZERS[(models.NAMES.index(name) + SIZES.index(workers)) % len(OPTIMIZERS)]


def training(strategy: str, name: str, optimizer: str, dtype: str) -> Training:
    if strategy == "mirrored":
        return models.in_keras(name, models.TF_OPTIMIZERS[optimizer], dtype)
    return models.in_jax(name, models.JAX_OPTIMIZERS[optimizer], dtype)


@cache
def references(strategy: str, workers: int, names: tuple[str, ...]) -> dict[str, Outcome]:
    """Return the float64 outcomes of one process for the models of this number of workers."""
    trainings = {
        name: training(strategy, name, optimizer_of(name, workers), "float64") for name in names
    }
    if workers == 2 and strategy == "mirrored" and names == QUICK[strategy]:
        trainings |= models.KERAS
    return by_hand(trainings)


@cache
def references_in_float32(strategy: str) -> dict[str, Outcome]:
    return by_hand({name: training(strategy, name, "sgd", "float32") for name in models.NAMES})


def on_each_rank(cluster: nbdist.Cluster, strategy: str, program: Training) -> list[Outcome]:
    cluster.run(program.setup, strategy=strategy)
    options = StepOptions(data="train", epochs=program.epochs, batch=program.batch)
    run = cluster.run(program.step, step=options, strategy=strategy)
    cluster.run(f"after = {program.after}", strategy=strategy)
    objects = cluster.pull(["after"])
    return [Outcome(reported(run), objects[rank]["after"]) for rank in sorted(objects)]


def assert_same(ours: list[Outcome], reference: Outcome) -> None:
    """Check all numbers to 1e-9, and the final weights of all ranks for equality."""
    assert ours[0].reports.keys() == reference.reports.keys()
    for name, values in reference.reports.items():
        np.testing.assert_allclose(ours[0].reports[name], values, rtol=1e-9, err_msg=name)
    for our, their in zip(ours[0].after, reference.after, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-9, atol=1e-12)
    assert all(rank.after == ours[0].after for rank in ours)


@MODELS
def test_model_gives_the_numbers_of_one_device(
    cluster: nbdist.Cluster, name: str, strategy: str
) -> None:
    optimizer = optimizer_of(name, cluster.world_size)
    ours = on_each_rank(cluster, strategy, training(strategy, name, optimizer, "float64"))
    quick = QUICK[strategy]
    names = quick if name in quick else tuple(n for n in models.NAMES if n not in quick)
    assert_same(ours, references(strategy, cluster.world_size, names)[name])


@pytest.mark.full
@pytest.mark.parametrize("cluster", [2], indirect=True)
@MODELS
def test_float32_is_within_rounding_of_one_device(
    cluster: nbdist.Cluster, name: str, strategy: str
) -> None:
    """The error is relative to the norm of an array, because elements near zero lose all digits.

    The optimizer is SGD with momentum: Adam divides a gradient by its size and amplifies errors.
    """
    (ours, *_) = on_each_rank(cluster, strategy, training(strategy, name, "sgd", "float32"))
    reference = references_in_float32(strategy)[name]
    np.testing.assert_allclose(ours.reports["loss"], reference.reports["loss"], rtol=1e-5)
    for our, their in zip(ours.after, reference.after, strict=True):
        assert np.linalg.norm(np.subtract(our, their)) <= 1e-5 * np.linalg.norm(their)


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize("case", models.KERAS)
def test_keras_metrics_and_weighted_means_are_exact(cluster: nbdist.Cluster, case: str) -> None:
    """Metrics, and losses averaged over a mask or over sample weights."""
    ours = on_each_rank(cluster, "mirrored", models.KERAS[case])
    assert_same(ours, references("mirrored", 2, QUICK["mirrored"])[case])
