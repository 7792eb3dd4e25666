"""Step cells with Flax NNX, Equinox, Optax and bare pytrees: the numbers of one device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import StepOptions
from tests import jax_programs as programs
from tests import references as ref

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAINING = StepOptions(data="train", epochs=ref.EPOCHS, batch=ref.BATCH)
SMALL = StepOptions(data="ones", batch=8)
SETUP = programs.X64 + "import numpy as np\nones = np.ones(16)\n"


@pytest.fixture(scope="module", params=[1, 2, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=request.param, framework="jax") as running:
        running.run(ref.DATA + SETUP, strategy="pjrt")
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[nbdist.Cluster]:
    """Two workers, for what does not depend on their number."""
    with nbdist.Cluster(hosts=2, framework="jax") as running:
        running.run(SETUP, strategy="pjrt")
        yield running


@cache
def by_hand(name: str) -> dict[str, Any]:
    program: programs.Program = getattr(programs, name)
    return ref.by_hand(program.setup, program.plain, program.weights)


def step(cluster: nbdist.Cluster, cell: str, options: StepOptions = SMALL) -> nbdist.Run:
    return cluster.run(cell, step=options, strategy="pjrt")


def free(cluster: nbdist.Cluster, cell: str) -> str:
    """The value of a free cell, which has to be the same on all ranks."""
    results = set(cluster.run(cell, strategy="pjrt").results.values())
    assert len(results) == 1
    return str(results.pop())


def losses(run: nbdist.Run) -> list[float]:
    return [m.shared["loss"] for m in run.metrics if m.rank == 0 and m.step > 0]


def same(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-9, atol=1e-12)


def same_weights(cluster: nbdist.Cluster, program: programs.Program, theirs: list[Any]) -> None:
    cluster.run(f"weights = {program.weights}", strategy="pjrt")
    for objects in cluster.pull(["weights"]).values():
        for one, other in zip(objects["weights"], theirs, strict=True):
            same(one, other)


def test_flax_nnx_gives_the_numbers_of_one_device(cluster: nbdist.Cluster) -> None:
    """Batch statistics, dropout, metrics and a frozen extractor; the objects stay the same."""
    reference = by_hand("NNX")
    cluster.run(programs.NNX.setup, strategy="pjrt")
    cluster.run("net, parts = model, [model.first, optimizer]", strategy="pjrt")
    run = step(cluster, programs.NNX.step, TRAINING)
    same(losses(run), reference["losses"])
    same_weights(cluster, programs.NNX, reference["weights"])
    says = "net is model and parts[0] is net.first, int(model.drop.rngs.count[...])"
    assert free(cluster, says) == "(True, 22)"
    mean = float(free(cluster, "float(metrics.compute()['mean'])"))
    assert mean == pytest.approx(np.mean(reference["losses"]), rel=1e-5)
    assert free(cluster, "model(features(images[:3])).shape") == "(3, 10)"


def test_equinox_gives_the_numbers_of_one_device(cluster: nbdist.Cluster) -> None:
    """A stateful layer, dropout, a schedule, MultiSteps; traced once for each shape of batch."""
    reference = by_hand("EQUINOX")
    cluster.run(programs.EQUINOX.setup, strategy="pjrt")
    run = step(cluster, programs.EQUINOX.step, TRAINING)
    same(losses(run), reference["losses"])
    same_weights(cluster, programs.EQUINOX, reference["weights"])
    assert free(cluster, "sorted(set(traced)), len(traced)") == "([(41, 64), (96, 64)], 2)"
    apply = "eqx.nn.inference_mode(model)(images[0], state, None)[0].shape"
    assert free(cluster, apply) == "(10,)"
