"""Pipelines compute the values of one device for any partition, and send only what is necessary."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nbdist.errors import UsageError
from nbdist.parallel.pipeline.stacked_layers import pipelined
from nbdist.parallel.placement.meshes import meshes
from nbdist.parallel.placement.place import place
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec

WIDTH, HIDDEN, ROWS, WORDS, STEPS = 8, 16, 16, 4, 3
SPECS = {
    "scale": PartitionSpec(),
    "mix": PartitionSpec(None, "model"),
    "back": PartitionSpec("model"),
    "up": PartitionSpec(None, "model"),
    "down": PartitionSpec("model"),
}

def layer(own, x):
    "Attention and a network of two layers, of which both are sharded over the model axis."
    normal = own["scale"] * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
    q, k, v = jnp.split(normal @ own["mix"], 3, -1)
    mixed = jax.nn.softmax(q @ k.mT / WIDTH**0.5) @ v
    x = x + mixed @ own["back"]
    return x + jnp.tanh(x @ own["up"]) @ own["down"]

def made(layers, seed=0):
    r = np.random.default_rng(seed)
    def drawn(*shape):
        return (r.normal(size=(layers, *shape)) / shape[0] ** 0.5 / 2).astype(np.float32)
    params = {
        "scale": 1 + drawn(WIDTH),
        "mix": drawn(WIDTH, 3 * WIDTH),
        "back": drawn(WIDTH, WIDTH),
        "up": drawn(WIDTH, HIDDEN),
        "down": drawn(HIDDEN, WIDTH),
    }
    x, y = r.normal(size=(2, ROWS, WORDS, WIDTH)).astype(np.float32)
    return params, x, y

def plain(params, x):
    return jax.lax.scan(lambda h, own: (layer(own, h), None), x, params)[0]

def loss_of(apply):
    return lambda params, x, y: jnp.mean((apply(params, x) - y) ** 2)

def trained(apply, params, x, y):
    "The losses of some steps, and the first one's gradients."
    step = jax.jit(jax.value_and_grad(loss_of(apply)))
    losses, first = [], None
    for _ in range(STEPS):
        loss, gradients = step(params, x, y)
        first = first or gradients
        losses.append(float(loss))
        params = jax.tree.map(lambda a, g: a - 0.1 * g, params, gradients)
    return losses, first
"""
names: dict[str, Any] = {}
exec(PROGRAM, names)
layer, made, plain, loss_of, trained = (
    names[name] for name in ("layer", "made", "plain", "loss_of", "trained")
)
SPECS = names["SPECS"]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return meshes({"stage": 2, "data": 2, "model": 2})


def assert_close(found: Any, expected: Any) -> None:
    """Compare trees with a tolerance relative to the largest number of each array."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a).reshape(b.shape), b, rtol=0, atol=1e-6 * np.abs(b).max()
        ),
        found,
        expected,
    )


@pytest.mark.parametrize(
    ("micro", "rounds", "remat"),
    [
        (1, 1, False),
        (4, 1, True),
        (8, 4, False),
        pytest.param(8, 1, False, marks=pytest.mark.full),
        pytest.param(2, 2, True, marks=pytest.mark.full),
    ],
)
def test_training_over_data_model_and_stage_equals_one_device(
    mesh: Mesh, micro: int, rounds: int, remat: bool
) -> None:
    params, x, y = made(8)
    losses, gradients = trained(plain, params, x, y)
    apply = pipelined(layer, mesh=mesh, micro=micro, rounds=rounds, remat=remat)
    rows = place((x, y), PartitionSpec("data"), mesh=mesh)
    found, own = trained(apply, apply.place(params, SPECS), *rows)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert losses[0] > losses[-1]
    assert_close(own, gradients)


@pytest.mark.parametrize(
    ("stages", "rounds", "per", "factor", "micro", "data"),
    [(1, 3, 1, 2, 2, True), (4, 1, 2, 3, 1, False), (2, 2, 1, 1, 3, True)],
)
def test_a_pipeline_equals_a_scan(
    stages: int, rounds: int, per: int, factor: int, micro: int, data: bool
) -> None:
    """Include one stage, fewer microbatches than stages, and several rounds."""
    assert_equals_a_scan(stages, rounds, per, factor, micro, data)


@pytest.mark.full
@settings(max_examples=6)
@given(
    stages=st.sampled_from([1, 2, 4]),
    rounds=st.integers(1, 3),
    per=st.integers(1, 2),
    factor=st.integers(1, 3),
    micro=st.integers(1, 5),
    data=st.booleans(),
)
def test_a_pipeline_equals_a_scan_for_any_sizes(
    stages: int, rounds: int, per: int, factor: int, micro: int, data: bool
) -> None:
    assert_equals_a_scan(stages, rounds, per, factor, micro, data)


def assert_equals_a_scan(
    stages: int, rounds: int, per: int, factor: int, micro: int, data: bool
) -> None:
    if rounds > 1:
        micro += stages - 1
    mesh = (
        meshes({"data": -1, "stage": stages})
        if data
        else meshes({"stage": stages}, devices=jax.devices()[:stages])
    )
    r = np.random.default_rng(per)
    w = (r.normal(size=(stages * rounds * per, 3, 3)) / 2).astype(np.float32)
    x = r.normal(size=(micro * factor, 3)).astype(np.float32)

    def simple(own: jax.Array, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ own) + h

    def whole(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, own: (simple(own, h), None), x, w)[0]

    def both(apply: Any, *args: Any) -> Any:
        """Return results and gradients, from one program."""

        @jax.jit
        def run(*args: Any) -> Any:
            made, back = jax.vjp(apply, *args)
            return made, back(2 * made)

        return run(*args)

    apply = pipelined(simple, mesh=mesh, micro=micro, rounds=rounds)
    own = apply.place(w)
    found, slopes = both(apply, own, x)
    wanted, wanted_slopes = both(whole, w, x)
    assert_close(found, wanted)
    assert_close(slopes, wanted_slopes)


@pytest.mark.parametrize("rounds", [1, 2])
def test_stages_send_to_neighbours_and_parameters_stay(mesh: Mesh, rounds: int) -> None:
    params, x, y = made(8)
    apply = pipelined(layer, mesh=mesh, micro=4, rounds=rounds)
    own = apply.place(params, SPECS)
    rows = place((x, y), PartitionSpec("data"), mesh=mesh)
    step = jax.jit(jax.value_and_grad(loss_of(apply)))
    program = step.lower(own, *rows).compile().as_text()
    assert "collective-permute" in program
    # Sizes of each layer's shards on a device. An all-gather over stages would double them.
    part = {leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(own)}
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", program)
    sizes = {int(np.prod([int(n) for n in shape.split(",") if n])) for shape in gathered}
    assert not sizes & {2 * size for size in part}
    _, gradients = step(own, *rows)
    jax.tree.map(lambda g, a: assert_same_sharding(g, a.sharding), gradients, own)


def assert_same_sharding(found: jax.Array, expected: jax.sharding.Sharding) -> None:
    assert found.sharding.is_equivalent_to(expected, found.ndim)


@pytest.mark.parametrize(("rounds", "remat"), [(1, False), (1, True), (2, False), (2, True)])
def test_backward_stores_no_copies_of_parameters(mesh: Mesh, rounds: int, remat: bool) -> None:
    params, x, y = made(8)
    apply = pipelined(layer, mesh=mesh, micro=4, rounds=rounds, remat=remat)
    own = apply.place(params, SPECS)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss_of(apply)))(own, x, y))
    ticks = 4 * rounds + 1
    stored = {
        tuple(int(number) for number in shape.split(","))
        for shape in re.findall(rf"f32\[{ticks},([\d,]+)\]", jaxpr)
    }
    per_layer = {leaf.shape[1:] for leaf in jax.tree.leaves(params)}
    assert stored
    assert not [shape for shape in stored if shape[-2:] in per_layer]
    if remat:  # only the inputs of each layer, per microbatch
        assert {shape[-3:] for shape in stored} == {(4, 4, 8)}


@pytest.mark.parametrize("rounds", [1, 2])
def test_values_of_idle_stages_are_not_used(rounds: int) -> None:
    """The second layer is NaN unless the first one has made its input positive."""
    mesh = meshes({"stage": 2}, devices=jax.devices()[:2])
    layers = 2 * rounds
    params = {
        "w": np.linspace(0.5, 1, layers, dtype=np.float32),
        "first": (np.arange(layers) == 0).astype(np.float32),
    }
    x = -np.arange(1, 9, dtype=np.float32)[:, None]

    def root(own: Any, h: jax.Array) -> jax.Array:
        positive = jnp.where(own["first"] == 1, h**2, h)
        return own["w"] * jnp.sqrt(positive)

    def whole(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, own: (root(own, h), None), x, params)[0]

    def summed(apply: Any) -> Any:
        return jax.value_and_grad(
            lambda w, x: jnp.sum(apply(params_of(apply) | {"w": w}, x)), argnums=(0, 1)
        )

    def params_of(apply: Any) -> Any:
        return params if apply is whole else piped.place(params)

    piped = pipelined(root, mesh=mesh, micro=4, rounds=rounds)
    expected = summed(whole)(params["w"], x)
    assert_close(summed(piped)(piped.place(params)["w"], x), expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))


def test_trees_with_integers_pass_through_the_stages() -> None:
    mesh = meshes({"stage": 4}, devices=jax.devices()[:4])
    w = np.linspace(0.5, 1, 4, dtype=np.float32)
    x = {"h": np.ones((8, 3), np.float32), "mask": np.arange(8) % 2}

    def masked(own: jax.Array, x: Any) -> Any:
        return x | {"h": x["h"] + own * x["mask"][:, None]}

    apply = pipelined(masked, mesh=mesh, micro=2)
    made = apply(w, x)
    np.testing.assert_array_equal(made["mask"], x["mask"])
    np.testing.assert_allclose(made["h"][:2], [[1] * 3, [4] * 3])
    found = jax.grad(lambda w: apply(w, x)["h"].sum())(w)
    np.testing.assert_allclose(found, [12] * 4)


def test_rows_keep_their_sharding(mesh: Mesh) -> None:
    params, x, _ = made(2)
    apply = pipelined(layer, mesh=mesh, micro=4)
    rows = place(x, PartitionSpec("data"), mesh=mesh)
    out = jax.jit(apply)(apply.place(params, SPECS), rows)
    assert_same_sharding(out, NamedSharding(mesh, PartitionSpec("data")))
    assert_close(out, plain(params, x))


def test_layers_may_constrain_their_sharding(mesh: Mesh) -> None:
    params, x, _ = made(2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model"))

    def constrained(own: Any, h: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(layer(own, h), sharding)

    apply = pipelined(constrained, mesh=mesh, micro=2)
    assert_close(apply(apply.place(params, SPECS), x), plain(params, x))


def test_bubble_is_the_idle_share_of_stages(mesh: Mesh) -> None:
    assert pipelined(layer, mesh=mesh, micro=1).bubble == 1 / 2
    assert pipelined(layer, mesh=mesh, micro=7).bubble == 1 / 8
    assert pipelined(layer, mesh=mesh, micro=7, rounds=3).bubble == 1 / 22


def test_blocks_are_assigned_to_stages_in_turn(mesh: Mesh) -> None:
    apply = pipelined(layer, mesh=mesh, micro=2, rounds=2)
    placed = apply.place(np.arange(8, dtype=np.float32))
    assert placed.shape == (2, 2, 2)
    for shard in placed.addressable_shards:
        stage = int(np.argwhere(mesh.devices == shard.device)[0][0])
        np.testing.assert_array_equal(
            np.asarray(shard.data).ravel(), [[0, 1, 4, 5], [2, 3, 6, 7]][stage]
        )
    np.testing.assert_array_equal(placed.reshape(-1), np.arange(8))


def test_specs_may_be_tuples(mesh: Mesh) -> None:
    apply = pipelined(layer, mesh=mesh, micro=2)
    params, _, _ = made(4)
    specs = {name: tuple(spec) for name, spec in SPECS.items()}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, apply.place(params, specs))
    assert shardings == jax.tree.map(lambda leaf: leaf.sharding, apply.place(params, SPECS))
    with pytest.raises(UsageError, match=r"specs has no place for params\['down'\]"):
        apply.place(params, {name: spec for name, spec in specs.items() if name != "down"})
    with pytest.raises(UsageError, match=r"^specs contains 3: use a PartitionSpec over the other"):
        apply.place(params, {**specs, "down": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"axis": "pipe", "micro": 0},
            r"'pipe' is not in the mesh.*stage \(2\).*; micro=0: use",
        ),
        ({"micro": 4, "rounds": 1.5}, "rounds=1.5: use a whole number"),
        ({"micro": 1, "rounds": 2}, "micro=1 is less than the 2 stages.*use micro=2 or more"),
    ],
)
def test_invalid_options_are_refused(mesh: Mesh, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pipelined(layer, mesh=mesh, **options)


def test_a_mesh_with_explicit_axes_is_refused() -> None:
    explicit = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Explicit,))
    with pytest.raises(UsageError, match=r"axes are Explicit: make them Auto, as nbdist\.meshes"):
        pipelined(layer, mesh=explicit, micro=2)


def test_invalid_sizes_are_refused(mesh: Mesh) -> None:
    params, x, _ = made(3)
    apply = pipelined(layer, mesh=mesh, micro=4)
    for call in (lambda: apply(params, x), lambda: apply.place(params)):
        with pytest.raises(UsageError, match="3 layers do not divide into 2 stages: stack 2 or 4"):
            call()
    params, x, _ = made(4)
    with pytest.raises(UsageError, match=r"15 rows .* micro=4: use a micro of 1, 3, 5, 15, or 12"):
        apply(params, x[:15])
    with pytest.raises(UsageError, match=r"params\['up'\] has 3"):
        apply(params | {"up": params["up"][:3]}, x)
    around = pipelined(layer, mesh=mesh, micro=4, rounds=2)
    with pytest.raises(UsageError, match=r"\['up'\] \[4, 8, 16\].*apply.place\(params\) once"):
        around(params, x)
    with pytest.raises(
        UsageError, match=r"6 layers do not .* into 2 stages x 2 rounds: stack 4 or 8"
    ):
        around.place(made(6)[0])
    with pytest.raises(UsageError, match="there are no leaves"):
        apply({}, x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda own, h: h[:, :2], r"returns float32\[4, 2, 8\] for float32\[4, 4, 8\]"),
        (lambda own, h: h.astype("bfloat16"), r"returns bfloat16\[4, 4, 8\] for float32"),
    ],
)
def test_a_layer_that_changes_its_input_type_is_refused(
    mesh: Mesh, changes: Any, message: str
) -> None:
    params, x, _ = made(2)
    with pytest.raises(UsageError, match=message):
        pipelined(changes, mesh=mesh, micro=4)(params, x)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=4, framework="jax", devices_per_host=2) as running:
        yield running


CELL = """
from nbdist.parallel.placement.meshes import meshes
from nbdist.parallel.pipeline.stacked_layers import pipelined
from nbdist.parallel.placement.place import place
found = []
ours = meshes({"data": 2, "model": 2, "stage": 2})
params, x, y = made(4)
with jax.default_matmul_precision("highest"), jax.set_mesh(ours):
    _, alone = trained(plain, *place((params, x, y), "replicated", mesh=ours))
    for rounds in (1, 2):
        apply = pipelined(layer, mesh=ours, micro=4, rounds=rounds)
        own, rows = apply.place(params, SPECS), place((x, y), "batch", mesh=ours)
        losses, gradients = trained(apply, own, *rows)
        whole = place(gradients, "replicated", mesh=ours)
        wrong = [
            float(np.abs(np.asarray(whole[name]).reshape(g.shape) - g).max() / np.abs(g).max())
            for name, g in ((name, np.asarray(g)) for name, g in alone.items())
        ]
        found.append((losses, max(wrong), len(own["up"].sharding.device_set)))
found
"""


@pytest.mark.full
def test_a_pipeline_over_four_processes(cluster: nbdist.Cluster) -> None:
    losses, _ = trained(plain, *made(4))
    results = cluster.run(PROGRAM + CELL, strategy="pjrt").results
    assert set(results) == {0, 1, 2, 3}
    for result in results.values():
        for found, wrong, devices in ast.literal_eval(result):
            np.testing.assert_allclose(found, losses, rtol=1e-6)
            assert wrong < 1e-6
            assert devices == 8
