"""Every layout of the search gives the losses of one device and the memory that XLA reports."""

from __future__ import annotations

import ast
import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from nbdist.planner.search.search import layouts
from nbdist.planner.search.step_variants import REMATS
from nbdist.records import DATA, MODEL, REPLICATE, Planning, StepOptions
from tests import clusters, references
from tests.plan_models import engines, model_of_program
from tests.plan_programs import BATCH, PROGRAMS, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from nbdist.records import Plan, PlannedTensor, Remat

DEVICES = 8
HOSTS = 1, 2, 4


class Degrees(NamedTuple):
    """Requested degrees of a plan, written as `4-2-3` in test ids."""

    data: int
    model: int
    zero: int
    remat: Remat = ""
    micro: int = 1
    sequence: bool = False
    replicate: int = 1

    def __str__(self) -> str:
        extra = [self.remat] * bool(self.remat) + [f"micro{self.micro}"] * (self.micro > 1)
        extra += ["sequence"] * self.sequence
        extra += [f"replicate{self.replicate}"] * (self.replicate > 1)
        return "-".join(map(str, (*self[:3], *extra)))

    @property
    def axes(self) -> dict[str, int]:
        return {DATA: self.data, MODEL: self.model, REPLICATE: self.replicate}

    @property
    def planning(self) -> Planning:
        """Planning options that fix exactly these degrees."""
        extra = {"zero": self.zero, "micro": self.micro, "sequence": int(self.sequence)}
        return Planning(fixed={**self.axes, **extra}, remat=self.remat)


GROUPED_CONVOLUTION = "depthwise CNN"
"""XLA computes wrong gradients of grouped convolutions on a mesh of two axes."""

MIXED_ROWS = "experts"
"""Its rows share the slots of experts, so that it has no microbatches."""

SEQUENCE_DEGREES = {
    "transformer": {1: (2, 4), 2: (2, 4), 4: (2,)},
    "tied transformer": dict.fromkeys(HOSTS, (2, 4, 8)),
    "experts": dict.fromkeys(HOSTS, (2,)),
}
"""Allowed model degrees by program and number of hosts for the flag `sequence`.

The flag shards the inputs of products along the sequence or along the slots of experts. Programs
without an entry contain no product that allows it."""

LAYOUTS = [
    Degrees(data, DEVICES // data, zero, sequence=sequence)
    for data in (8, 4, 2, 1)
    for zero in ((0, 1, 3) if data > 1 else (0,))
    for sequence in ((False, True) if data < DEVICES else (False,))
]
LAYOUTS += [
    Degrees(*degrees, *extra)
    for degrees in ((8, 1, 0), (4, 2, 3), (1, 8, 0))
    for extra in (*((remat,) for remat in REMATS[1:]), ("", 2), ("full", 2))
]
LAYOUTS += [Degrees(2, 4, 3, "full", 2, sequence=True)]
LAYOUTS += [
    Degrees(4, 1, 3, replicate=2),
    Degrees(2, 1, 1, micro=2, replicate=4),
    Degrees(2, 2, 3, "full", 2, replicate=2),
]


def possible(hosts: int, name: str) -> list[Degrees]:
    return [
        d
        for d in LAYOUTS
        if (name != GROUPED_CONVOLUTION or (1 in (d.data, d.model) and d.replicate == 1))
        and (name != MIXED_ROWS or d.micro == 1)
        and (not d.sequence or d.model in SEQUENCE_DEGREES.get(name, {}).get(hosts, ()))
    ]


QUICK = {
    (1, "tied transformer", Degrees(2, 4, 3, "full", 2, sequence=True)),
    (1, "experts", Degrees(4, 2, 1)),
    (1, "recommender", Degrees(8, 1, 3)),
    (1, "tied transformer", Degrees(2, 2, 3, "full", 2, replicate=2)),
}
"""Cases of `make test`, as hosts, program and layout; `make test-full` runs all.

`test_planned_stages.py` and `test_planned_fits.py` have plans on two hosts.
"""

CASES = [
    pytest.param(
        hosts,
        name,
        degrees,
        marks=() if (hosts, name, degrees) in QUICK else pytest.mark.full,
        id=f"{hosts}x{DEVICES // hosts}-{name}-{degrees}",
    )
    for hosts in HOSTS
    for name in PROGRAMS
    for degrees in possible(hosts, name)
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    hosts = request.param
    per_host = DEVICES // hosts
    with clusters.cluster(hosts=hosts, framework="jax", devices_per_host=per_host) as running:
        yield running


@cache
def plain_losses(quick: bool) -> dict[str, list[float]]:
    """Return the losses of the programs in `QUICK`, or of the others, on one device."""
    named = {name for _, name, _ in QUICK}
    texts = {
        name: f"{program.plain}\noutcome = losses"
        for name, program in PROGRAMS.items()
        if (name in named) == quick
    }
    return references.plainly(texts, "jax", "optax")


@pytest.mark.parametrize(("cluster", "name", "degrees"), CASES, indirect=["cluster"])
def test_layout_trains_as_one_device(cluster: nbdist.Cluster, name: str, degrees: Degrees) -> None:
    program = PROGRAMS[name]
    cluster.run(program.setup, strategy="pjrt")
    run = cluster.run(
        program.step,
        strategy="pjrt",
        step=StepOptions(data="train", batch=BATCH, planning=degrees.planning),
    )
    losses = references.reported(run)["loss"]
    assert len(losses) == STEPS
    quick = any(name == one for _, one, _ in QUICK)
    np.testing.assert_allclose(losses, plain_losses(quick)[name], rtol=1e-5)
    assert run.plan is not None
    assert {REPLICATE: 1, **run.plan.axes} == degrees.axes
    assert (run.plan.zero, run.plan.remat, run.plan.micro, run.plan.sequence) == degrees[2:6]
    assert any(MODEL in axes for t in carried(run.plan) for axes in t.spec) == (degrees.model > 1)
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments
    actual_shards = cluster.run(SHARDS.format(given=program.given), strategy="pjrt").results
    for text in actual_shards.values():
        assert sorted(ast.literal_eval(text)) == sorted(shards(run.plan))


@pytest.mark.parametrize(
    "hosts", [pytest.param(n, marks=() if n == 1 else pytest.mark.full) for n in HOSTS]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "experts" else pytest.mark.full) for name in PROGRAMS],
)
def test_tested_layouts_are_all_of_the_search(hosts: int, name: str) -> None:
    search_result = layouts(model_of_program(name), engines(hosts, DEVICES // hosts), Planning())
    plain = [
        degrees
        for degrees in possible(hosts, name)
        if (degrees.remat, degrees.micro, degrees.replicate) == ("", 1, 1)
    ]
    assert [
        Degrees(layout.data, layout.model, layout.zero, sequence=layout.sequence)
        for layout in search_result
    ] == plain


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_carried_arrays_are_resharded_for_another_plan(cluster: nbdist.Cluster) -> None:
    program = PROGRAMS["MLP"]
    cluster.run(program.setup, strategy="pjrt")
    for degrees in (Degrees(8, 1, 3), Degrees(2, 4, 0), Degrees(8, 1, 0)):
        options = StepOptions(data="train", batch=BATCH, planning=degrees.planning)
        run = cluster.run(program.step, strategy="pjrt", step=options)
        assert run.plan is not None
        assert run.compiled is not None
        assert run.compiled.arguments == run.plan.memory.arguments


GROUPED_GRADIENT = """
import jax, jax.numpy as jnp, numpy as np
def gradient(x, kernel):
    def total(kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4).sum()
    return jax.grad(total)(kernel)
x, kernel = np.ones((8, 4, 4, 4), "f4"), np.ones((3, 3, 1, 4), "f4")
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
whole, rows = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
with jax.set_mesh(mesh):
    kernel = jax.device_put(kernel, whole)
    right = jax.jit(gradient)(jax.device_put(x, whole), kernel)
    wrong = jax.jit(gradient)(jax.device_put(x, rows), kernel)
np.unique(np.asarray(wrong) / np.asarray(right)).tolist()
"""


@pytest.mark.full
@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_xla_gradients_of_grouped_convolutions_are_still_wrong(cluster: nbdist.Cluster) -> None:
    """If this test fails, XLA is fixed and `Model.apart` can be removed."""
    assert set(cluster.run(GROUPED_GRADIENT, strategy="pjrt").results.values()) == {"[2.0]"}


ODD_SETUP = """
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
params = {name: jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32)
          for name in ("w", "same", "unused")}
half, few, count = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((), jnp.int8), 0
key, flags, table = jax.random.key(0, impl="rbg"), np.arange(64) % 3 > 0, np.eye(64, dtype="f4")
train = rng.normal(size=(24, 64)).astype("f4"), np.arange(24, dtype="i2"), np.zeros((24, 5))
"""

ODD_STEP = """
x, row, unread = batch
key, own = jax.random.split(key)
def loss_of(params):
    y = jnp.where(flags, x @ params["w"], table[row % 64]) @ half.astype(x.dtype)
    return jnp.mean((y - x @ params["same"] / (row[:, None] + few)) ** 2)
loss, grads = jax.value_and_grad(loss_of)(params)
loss = loss * (1 + 0 * jax.random.uniform(own))
params = {**params, "w": params["w"] - 0.1 * grads["w"]}
half, few, count = half * 0.5, few, count + 1
"""


@pytest.mark.parametrize("cluster", [1], indirect=True)
@pytest.mark.parametrize("batch", [pytest.param(8, marks=pytest.mark.full), 12])
@pytest.mark.parametrize(
    "degrees",
    [Degrees(4, 2, 3), pytest.param(Degrees(2, 4, 1), marks=pytest.mark.full)],
    ids=str,
)
def test_planned_memory_is_exact_for_unusual_arguments(
    cluster: nbdist.Cluster, degrees: Degrees, batch: int
) -> None:
    """Small types, random keys, unused or unchanged arrays, batches that 8 does not divide."""
    cluster.run(ODD_SETUP, strategy="pjrt")
    options = StepOptions(data="train", batch=batch, planning=degrees.planning)
    run = cluster.run(ODD_STEP, strategy="pjrt", step=options)
    assert run.plan is not None
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments


SHARDS = """
from flax import nnx
arrays = [leaf for leaf in jax.tree.leaves(nnx.state(({given}), graph=True))
          if isinstance(leaf, jax.Array)]
[(array.shape, array.addressable_shards[0].data.shape) for array in arrays]
"""


def carried(plan: Plan) -> list[PlannedTensor]:
    return [tensor for tensor in plan.tensors if tensor.role in ("parameter", "state")]


def shards(plan: Plan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the global and the per-device shape of each carried tensor."""
    return [(tensor.shape, shard(tensor, plan.axes)) for tensor in carried(plan)]


def shard(tensor: PlannedTensor, axes: dict[str, int]) -> tuple[int, ...]:
    return tuple(
        size // math.prod(axes[axis] for axis in names)
        for size, names in zip(tensor.shape, tensor.spec, strict=True)
    )
