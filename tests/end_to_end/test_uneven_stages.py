"""Stages that do not divide the layers give the losses and the state of one device."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import DATA, MODEL, STAGE, Planning, StepOptions
from tests import clusters, references
from tests.end_to_end.test_planned import SHARDS, carried, shards
from tests.plan_programs import BATCH, PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from nbdist.records import Schedule

DEVICES, LAYERS = 8, 6
_TIED = PROGRAMS["tied transformer"]
_FOUR = "LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 4,"
assert _FOUR in _TIED.setup
PROGRAM = _TIED._replace(setup=_TIED.setup.replace(_FOUR, _FOUR.replace("4,", f"{LAYERS},")))
"""Program with a scan over six layers: two on each of two stages, and one on each of the others."""

STATE = "{path: np.asarray(array).tolist() for path, array in params['layers'].items()}"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    hosts = request.param
    with clusters.cluster(
        hosts=hosts, framework="jax", devices_per_host=DEVICES // hosts
    ) as running:
        yield running


@cache
def plain() -> dict[str, Any]:
    """Return the losses and the parameters of the layers in plain JAX on one device."""
    code = f"{PROGRAM.plain}\noutcome = losses, {STATE}"
    return dict(
        zip(
            ("losses", "layers"),
            references.plainly({"it": code}, "jax", "optax")["it"],
            strict=True,
        )
    )


CASES = [
    pytest.param(hosts, schedule, fixed, marks=marks, id=f"{hosts}-{schedule}-{name}")
    for hosts, schedule, name, fixed, marks in (
        (2, "gpipe", "data", {DATA: 2, MODEL: 1, "micro": 4, "zero": 1}, ()),
        (2, "1f1b", "model", {DATA: 1, MODEL: 2, "micro": 8}, ()),
        (1, "1f1b", "data", {DATA: 2, MODEL: 1, "micro": 8}, pytest.mark.full),
        (1, "gpipe", "model", {DATA: 1, MODEL: 2, "micro": 4}, pytest.mark.full),
        (4, "gpipe", "model", {DATA: 1, MODEL: 2, "micro": 4}, ()),
        (4, "1f1b", "data", {DATA: 2, MODEL: 1, "micro": 4, "zero": 1}, pytest.mark.full),
    )
]


@pytest.mark.parametrize(("cluster", "schedule", "fixed"), CASES, indirect=["cluster"])
def test_uneven_stages_train_as_one_device(
    cluster: nbdist.Cluster, schedule: Schedule, fixed: dict[str, int]
) -> None:
    cluster.run(PROGRAM.setup, strategy="pjrt")
    planning = Planning(fixed={STAGE: 4, **fixed}, schedule=schedule)
    options = StepOptions(data="train", batch=BATCH, planning=planning)
    run = cluster.run(PROGRAM.step, strategy="pjrt", step=options)
    np.testing.assert_allclose(references.reported(run)["loss"], plain()["losses"], rtol=1e-5)
    assert run.plan is not None
    assert run.plan.axes[STAGE] == 4
    layers = [tensor for tensor in carried(run.plan) if "['layers']" in tensor.path]
    assert layers
    assert all(STAGE not in tensor.spec[0] for tensor in layers)
    assert all(any(STAGE in axes for axes in tensor.spec) for tensor in layers)
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments
    given = cluster.run(SHARDS.format(given=PROGRAM.given), strategy="pjrt").results
    for text in given.values():
        assert sorted(ast.literal_eval(text)) == sorted(shards(run.plan))


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_state_keeps_the_shape_of_all_layers(cluster: nbdist.Cluster) -> None:
    cluster.run(PROGRAM.setup, strategy="pjrt")
    options = StepOptions(
        data="train", batch=BATCH, planning=Planning(fixed={STAGE: 4, "micro": 4})
    )
    cluster.run(PROGRAM.step, strategy="pjrt", step=options)
    for text in cluster.run(f"import numpy as np\n{STATE}", strategy="pjrt").results.values():
        found = ast.literal_eval(text)
        assert found.keys() == plain()["layers"].keys()
        for name, wanted in plain()["layers"].items():
            assert len(found[name]) == LAYERS
            np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-6)
