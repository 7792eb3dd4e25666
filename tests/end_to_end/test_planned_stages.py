"""Pipelined steps give the losses of one device and the memory that XLA reports."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from nbdist.errors import CellError
from nbdist.records import DATA, MODEL, STAGE, Planning, Saving, Staging, StepOptions
from tests import clusters, references
from tests.end_to_end.test_planned import SHARDS, carried, shards
from tests.plan_programs import BATCH, PROGRAMS, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist
    from nbdist.records import Remat, Schedule

DEVICES = 8
PROGRAM = PROGRAMS["tied transformer"]
"""Program with a scan over four layers."""


class Degrees(NamedTuple):
    """Requested degrees of a plan, written as `2-2-2-1-micro4` in test ids."""

    stage: int
    data: int
    model: int
    zero: int
    micro: int
    remat: Remat = ""
    sequence: bool = False
    schedule: Schedule = "gpipe"
    rounds: int = 1

    def __str__(self) -> str:
        extra = [self.remat] * bool(self.remat) + ["sequence"] * self.sequence
        extra += [self.schedule] * (self.schedule != "gpipe")
        extra += [f"{self.rounds} rounds"] * (self.rounds > 1)
        return "-".join([*map(str, self[:4]), f"micro{self.micro}", *extra])

    @property
    def planning(self) -> Planning:
        axes = {STAGE: self.stage, DATA: self.data, MODEL: self.model}
        extra = {"zero": self.zero, "micro": self.micro, "sequence": int(self.sequence)}
        extra["rounds"] = self.rounds
        return Planning(fixed={**axes, **extra}, remat=self.remat, schedule=self.schedule)


CASES = [
    pytest.param(hosts, degrees, marks=marks, id=f"{hosts}x{DEVICES // hosts}-{degrees}")
    for hosts, degrees, marks in (
        (1, Degrees(2, 2, 2, 1, 4), pytest.mark.full),
        (1, Degrees(4, 2, 1, 0, 8, "full"), pytest.mark.full),
        (1, Degrees(4, 1, 2, 0, 4), pytest.mark.full),
        (1, Degrees(2, 2, 2, 1, 4, "full", sequence=True), pytest.mark.full),
        (1, Degrees(2, 4, 1, 0, 2, "selective"), pytest.mark.full),
        (1, Degrees(2, 2, 2, 1, 8, "full", sequence=True, schedule="1f1b"), pytest.mark.full),
        (1, Degrees(4, 2, 1, 0, 8, "selective", schedule="1f1b"), pytest.mark.full),
        (1, Degrees(2, 4, 1, 0, 4, "selective", schedule="1f1b", rounds=2), pytest.mark.full),
        (1, Degrees(2, 2, 2, 1, 4, rounds=2), pytest.mark.full),
        (2, Degrees(2, 2, 2, 1, 4, "full", True, "1f1b", 2), ()),
        (4, Degrees(4, 2, 1, 1, 4), pytest.mark.full),
        (4, Degrees(4, 2, 1, 0, 8, schedule="1f1b"), pytest.mark.full),
        (4, Degrees(2, 2, 2, 1, 4, "full", True, "1f1b", 2), pytest.mark.full),
        (4, Degrees(2, 4, 1, 0, 4, rounds=2), pytest.mark.full),
        (4, Degrees(2, 2, 2, 0, 8, "full"), pytest.mark.full),
    )
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    hosts = request.param
    per_host = DEVICES // hosts
    with clusters.cluster(hosts=hosts, framework="jax", devices_per_host=per_host) as running:
        yield running


@cache
def plain_losses() -> list[float]:
    """Return the losses in plain JAX on one device."""
    return references.plainly({"it": f"{PROGRAM.plain}\noutcome = losses"}, "jax", "optax")["it"]


@pytest.mark.parametrize(("cluster", "degrees"), CASES, indirect=["cluster"])
def test_pipeline_trains_as_one_device(cluster: nbdist.Cluster, degrees: Degrees) -> None:
    cluster.run(PROGRAM.setup, strategy="pjrt")
    options = StepOptions(data="train", batch=BATCH, planning=degrees.planning)
    run = cluster.run(PROGRAM.step, strategy="pjrt", step=options)
    losses = references.reported(run)["loss"]
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, plain_losses(), rtol=1e-5)
    assert run.plan is not None
    assert tuple(run.plan.axes.items()) == (
        (STAGE, degrees.stage),
        (DATA, degrees.data),
        (MODEL, degrees.model),
    )
    plan = run.plan
    actual = plan.zero, plan.micro, plan.remat, plan.sequence, plan.schedule, plan.rounds
    assert actual == degrees[3:]
    layers = [t for t in carried(run.plan) if "['layers']" in t.path]
    assert layers
    assert all(tensor.spec[0] == (STAGE,) for tensor in layers)
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments
    actual_shards = cluster.run(SHARDS.format(given=PROGRAM.given), strategy="pjrt").results
    for text in actual_shards.values():
        assert sorted(ast.literal_eval(text)) == sorted(shards(run.plan))


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_stages_need_a_scan_over_layers(cluster: nbdist.Cluster) -> None:
    program = PROGRAMS["MLP"]
    cluster.run(program.setup, strategy="pjrt")
    options = StepOptions(data="train", batch=BATCH, planning=Planning(fixed={STAGE: 2}))
    with pytest.raises(CellError, match=r"PlanError.*there is no scan over layers to divide"):
        cluster.run(program.step, strategy="pjrt", step=options)


MANUAL_SHARDING = """
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.NamedSharding(mesh, jax.P(None, None, "data"))
params["layers"]["up"] = jax.device_put(params["layers"]["up"], sharding)
"""


@pytest.mark.full  # test_sharded_state.py keeps a sharding of the user
@pytest.mark.parametrize("cluster", [1], indirect=True)
@pytest.mark.parametrize("axes", [{STAGE: 4, "micro": 4}, {DATA: 4, MODEL: 2}])
def test_manual_sharding_is_kept_and_its_memory_is_exact(
    cluster: nbdist.Cluster, axes: dict[str, int]
) -> None:
    cluster.run(PROGRAM.setup + MANUAL_SHARDING, strategy="pjrt")
    options = StepOptions(data="train", batch=BATCH, planning=Planning(fixed=axes))
    run = cluster.run(PROGRAM.step, strategy="pjrt", step=options)
    np.testing.assert_allclose(references.reported(run)["loss"], plain_losses(), rtol=1e-5)
    assert run.plan is not None
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_last_batch_of_one_row_is_trained(cluster: nbdist.Cluster) -> None:
    cluster.run(f"{PROGRAM.setup}\ntrain = jax.tree.map(lambda a: a[: {BATCH} + 1], train)")
    options = StepOptions(
        data="train", batch=BATCH, planning=Planning(fixed={STAGE: 4, "micro": 4})
    )
    run = cluster.run(PROGRAM.step, strategy="pjrt", step=options)
    losses = references.reported(run)["loss"]
    assert len(losses) == 2
    np.testing.assert_allclose(losses[0], plain_losses()[0], rtol=1e-5)


FIT = """
import keras, jax, numpy as np
keras.utils.set_random_seed(1)

class Stack(keras.layers.Layer):
    def build(self, shape):
        self.up = self.add_weight((4, shape[-1], 32))
        self.down = self.add_weight((4, 32, shape[-1]))

    def call(self, x):
        def layer(h, p):
            return h + 0.3 * jax.nn.relu(h @ p[0]) @ p[1], None
        return jax.lax.scan(layer, x, (self.up.value, self.down.value))[0]

x = np.random.default_rng(0).normal(size=(160, 16)).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
layers = keras.layers.Dense(16), Stack(), keras.layers.Dense(1, activation="sigmoid")
model = keras.Sequential([keras.Input((16,)), *layers])
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=64, epochs=2, verbose=0, shuffle=False).history
"""
"""Fit whose last batch of an epoch contains half the rows."""


@pytest.mark.parametrize("cluster", [1], indirect=True)
@pytest.mark.parametrize(
    ("stages", "staging"),
    [
        (4, Staging()),
        pytest.param(4, Staging("1f1b"), marks=pytest.mark.full),
        pytest.param(2, Staging("1f1b", 2), marks=pytest.mark.full),
    ],
)
def test_keras_layer_with_a_scan_is_split_into_stages(
    cluster: nbdist.Cluster, stages: int, staging: Staging
) -> None:
    plain = references.plainly(
        {"it": f"{FIT}\noutcome = history"}, "jax", "keras", KERAS_BACKEND="jax"
    )["it"]
    fixed = {STAGE: stages, DATA: 2, "micro": 4, "rounds": staging.rounds}
    planning = Planning(fixed=fixed, schedule=staging.schedule)
    run = cluster.run(FIT, strategy="pjrt", step=StepOptions(data="", planning=planning))
    assert run.plan is not None
    assert run.plan.axes[STAGE] == stages
    assert (run.plan.schedule, run.plan.rounds) == staging[:2]
    (text,) = cluster.run("history", strategy="pjrt").results.values()
    for name, values in ast.literal_eval(text).items():
        np.testing.assert_allclose(values, plain[name], rtol=1e-4)


LAYERS_ONE_BY_ONE = PROGRAMS["transformer"]
SIX_LAYERS = LAYERS_ONE_BY_ONE._replace(
    setup=LAYERS_ONE_BY_ONE.setup.replace("VOCABULARY = 2,", "VOCABULARY = 6,")
)


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_layers_one_by_one_are_split_into_stages(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """A checkpoint contains the user's arrays, and another layout can resume from it."""
    plain = references.plainly({"it": f"{SIX_LAYERS.plain}\noutcome = losses"}, "jax", "optax")[
        "it"
    ]
    options = StepOptions(data="train", batch=BATCH, planning=Degrees(4, 2, 1, 1, 4).planning)
    cluster.run(SIX_LAYERS.setup, strategy="pjrt")
    saving = Saving(folder=str(tmp_path), every_steps=STEPS)
    run = cluster.run(SIX_LAYERS.step, strategy="pjrt", step=options, saving=saving)
    np.testing.assert_allclose(references.reported(run)["loss"], plain, rtol=1e-5)
    assert run.plan is not None
    assert run.plan.axes == {STAGE: 4, DATA: 2, MODEL: 1}
    layers = [tensor for tensor in carried(run.plan) if "['layers']" in tensor.path]
    assert layers
    whole = {t.path for t in layers if not any(STAGE in axes for axes in t.spec)}
    assert whole == {t.path for t in layers if len(t.shape) == 1}
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments

    by_rows = StepOptions(data="train", batch=BATCH, epochs=2, planning=Planning(fixed={DATA: 8}))
    cluster.run(SIX_LAYERS.setup, strategy="pjrt")
    unbroken = cluster.run(SIX_LAYERS.step, strategy="pjrt", step=by_rows)
    cluster.run(SIX_LAYERS.setup, strategy="pjrt")
    resume = Saving(folder=str(tmp_path), every_steps=STEPS, resume=True)
    resumed = cluster.run(SIX_LAYERS.step, strategy="pjrt", step=by_rows, saving=resume)
    second = references.reported(resumed)["loss"]
    np.testing.assert_allclose(
        second, references.reported(unbroken)["loss"][-len(second) :], rtol=1e-4
    )
    assert len(second) == STEPS


FUNCTIONAL = """
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(160, 16)).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
given = keras.Input((16,))
h = keras.layers.Dense(16)(given)
for _ in range(5):
    normed = keras.layers.LayerNormalization()(h)
    h = keras.layers.Add()([h, keras.layers.Dense(16, activation="tanh")(normed)])
model = keras.Model(given, keras.layers.Dense(1, activation="sigmoid")(h))
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=64, epochs=2, verbose=0, shuffle=False).history
"""
"""Functional model with equal layers, whose last batch of an epoch contains half the rows."""


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_layers_of_a_functional_keras_model_are_split_into_stages(
    cluster: nbdist.Cluster,
) -> None:
    plain = references.plainly(
        {"it": f"{FUNCTIONAL}\noutcome = history"}, "jax", "keras", KERAS_BACKEND="jax"
    )["it"]
    planning = Planning(fixed={STAGE: 4, DATA: 2, "micro": 4})
    run = cluster.run(FUNCTIONAL, strategy="pjrt", step=StepOptions(data="", planning=planning))
    assert run.plan is not None
    assert run.plan.axes == {STAGE: 4, DATA: 2, MODEL: 1}
    for text in cluster.run("history", strategy="pjrt").results.values():
        for name, values in ast.literal_eval(text).items():
            np.testing.assert_allclose(values, plain[name], rtol=1e-4)
