"""Placed data is unchanged and at its place. Errors state why data cannot be placed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec

import nbdist
from nbdist.errors import UsageError
from nbdist.records import StepOptions
from nbdist.worker.jax.runtime import platforms
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUTS = ("replicated", "batch", "model", "full")
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda n: (8 * n[0], 4 * n[1]))
DTYPES = st.sampled_from(
    ["float32", "int32", "uint8", "bool", "complex64", "float16", "bfloat16", "float8_e4m3fn"]
).map(jnp.dtype)
BYTES = st.tuples(DTYPES, SHAPES).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        hnp.arrays(np.uint8, (*kind[1], kind[0].itemsize), elements=st.integers(0, 1)),
    )
)
ARRAYS = BYTES.map(lambda made: made[1].view(made[0][0]).reshape(made[0][1]))
"""Arrays with random bits that are valid numbers of their type."""


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return nbdist.meshes({"data": -1, "model": 4})


def places() -> st.SearchStrategy[Any]:
    devices = jax.devices()
    return st.sampled_from(
        [
            *LAYOUTS,
            "auto",
            "cpu",
            *devices,
            *map(platforms.name_of, devices),
            PartitionSpec("model"),
        ]
    )


@given(st.data(), st.dictionaries(st.sampled_from("abc"), ARRAYS, min_size=1))
def test_placed_data_is_at_its_place_with_equal_bits(
    mesh: jax.sharding.Mesh, data: st.DataObject, tree: dict[str, np.ndarray]
) -> None:
    place = data.draw(places())
    with jax.set_mesh(mesh):
        placed = nbdist.place(tree, place)
        assert nbdist.where(placed) == place
    for name, array in tree.items():
        assert np.asarray(placed[name]).tobytes() == array.tobytes()


@given(st.data(), ARRAYS)
def test_data_at_its_place_is_not_copied(
    mesh: jax.sharding.Mesh, data: st.DataObject, array: np.ndarray
) -> None:
    place = data.draw(places())
    with jax.set_mesh(mesh):
        once = nbdist.place(array, place)
        assert nbdist.place(once, place) is once


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", [*LAYOUTS, "cpu:5"])
def test_data_moves_between_any_two_places(
    mesh: jax.sharding.Mesh, source: str, target: str
) -> None:
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    moved = nbdist.place(nbdist.place(array, source, mesh=mesh), target, mesh=mesh)
    np.testing.assert_array_equal(moved, array)
    with jax.set_mesh(mesh):
        assert nbdist.where(moved) == target
        assert (nbdist.where(moved) == source) == (source == target)


def test_computation_follows_the_placement(mesh: jax.sharding.Mesh) -> None:
    x = nbdist.place(np.ones((8, 4), np.float32), "batch", mesh=mesh)
    w = nbdist.place(np.ones((4, 8), np.float32), "model", mesh=mesh)
    product = jax.jit(jnp.matmul)(x, w)
    np.testing.assert_array_equal(product, np.full((8, 8), 4))
    assert product.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec("data", "model")), product.ndim
    )


def test_each_leaf_may_have_its_own_place(mesh: jax.sharding.Mesh) -> None:
    tree = {"w": [np.ones((8, 8)), np.ones((8, 4))], "b": np.ones(8), "n": 3}
    places = {"w": "full", "b": jax.devices()[2], "n": "replicated"}
    placed = nbdist.place(tree, places, mesh=mesh)
    with jax.set_mesh(mesh):
        assert nbdist.where(placed) == places
        assert nbdist.where(placed["w"]) == "full"
    assert placed["b"].devices() == {jax.devices()[2]}


def test_where_reports_each_array_and_device(mesh: jax.sharding.Mesh) -> None:
    placed = nbdist.place({"w": np.ones((8, 8), np.float32)}, "full", mesh=mesh)
    found = nbdist.where(placed | {"host": np.ones(3)})
    assert found.bytes_on == {platforms.name_of(device): 32 for device in jax.devices()}
    text = repr(found)
    assert "P('data', 'model'): parts of [4, 2]" in text
    assert "this process's memory (NumPy)" in text
    assert "<table" in found._repr_mimebundle_()["text/html"]
    assert found != "full"  # one array is not placed this way


def test_auto_explains_its_choice() -> None:
    small = nbdist.place(np.ones(4, np.float32), "auto", explain=True)
    assert "cpu:0" in small.reason
    assert "the largest array has 16 B" in small.reason
    assert nbdist.where(small.tree) == jax.devices()[0]
    again = nbdist.place(small.tree, "auto", explain=True)
    assert "nothing is moved" in again.reason
    assert again.tree is small.tree


def test_data_that_does_not_fit_in_memory_is_refused() -> None:
    """One terabyte as a broadcast view, whose elements share one number in memory."""
    large = np.broadcast_to(np.float32(1), (1 << 19, 1 << 19))
    for place in ("replicated", "cpu:0", "auto"):
        with pytest.raises(UsageError, match=r"do not fit: the host's memory needs .* missing"):
            nbdist.place(large, place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("cpx:3", "did you mean 'cpu:3'"),
        ("cpu:9", r"platform cpu \(cpu:0, ..., cpu:7\)"),
        ("bach", "did you mean 'batch'"),
        ("gpu", "use one of auto, replicated, batch, model, full, platform cpu"),
        (3.5, "has type float, which is no place"),
        (PartitionSpec("modle"), r"no axis 'modle' .*its axes are data \(2\), model"),
        ({"a": "batch", "c": "batch"}, r"where\['c'\] has no counterpart"),
    ],
)
def test_an_unknown_place_is_refused(mesh: jax.sharding.Mesh, place: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nbdist.place({"a": np.ones((8, 8)), "b": np.ones((8, 8))}, place, mesh=mesh)


def test_all_indivisible_arrays_are_reported_at_once(mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(UsageError) as raised:
        nbdist.place(
            {"a": np.ones((3, 3)), "b": np.ones((4, 4)), "c": np.ones(5)}, "batch", mesh=mesh
        )
    first, second = str(raised.value).splitlines()
    assert first.startswith("['a']: 'batch' shards dimension 0 of [3, 3] into 2")
    assert "make it 2 or 4" in first
    assert second.startswith("['c']")


def test_all_leaves_that_are_not_arrays_are_reported_at_once() -> None:
    donated = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    tree = {"a": "text", "b": [object(), 1.0], "c": np.array(["x"]), "d": donated}
    for call in (nbdist.place, nbdist.where):
        with pytest.raises(UsageError) as raised:
            call(tree)
        text = str(raised.value)
        assert "leaf ['a'] has type str" in text
        assert "leaf ['b'][0] has type object" in text
        assert "leaf ['c'] is of <U1" in text
        assert "leaf ['d'] [3] was donated" in text


@pytest.mark.parametrize("layout", [*LAYOUTS, PartitionSpec("model")])
def test_place_shards_arrays_within_a_program(mesh: jax.sharding.Mesh, layout: Any) -> None:
    def made(x: jax.Array) -> Any:
        return nbdist.place({"sum": x + 1, "twice": 2 * x}, layout)

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    with jax.set_mesh(mesh):
        found = jax.jit(made)(x)
        assert nbdist.where(found) == layout
        slope = jax.jit(jax.grad(lambda x: (made(x)["twice"] ** 2).sum()))(x)
    np.testing.assert_array_equal(found["sum"], x + 1)
    np.testing.assert_array_equal(slope, 8 * x)


def test_each_array_of_a_program_may_have_its_own_place(mesh: jax.sharding.Mesh) -> None:
    places = {"a": "batch", "b": NamedSharding(mesh, PartitionSpec(None, "model"))}
    placed = jax.jit(lambda x: nbdist.place({"a": x, "b": [x, x]}, places, mesh=mesh))(
        np.ones((8, 8))
    )
    with jax.set_mesh(mesh):
        assert nbdist.where(placed) == places


@pytest.mark.parametrize("place", ["auto", "cpu", "cpu:3", 3])
def test_place_within_a_program_refuses_other_devices(place: Any) -> None:
    with pytest.raises(UsageError, match="call place outside"):
        jax.jit(lambda x: nbdist.place(x, place))(jnp.ones(8))
    with pytest.raises(UsageError, match="no mesh is set"):
        jax.jit(lambda x: nbdist.place(x, "batch"))(jnp.ones(8))
    with pytest.raises(UsageError, match="it is traced"):
        jax.jit(nbdist.where)(jnp.ones(8))


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=4, framework="jax", devices_per_host=2) as running:
        yield running


def test_place_over_four_processes(cluster: nbdist.Cluster) -> None:
    cell = """
import nbdist, jax, numpy as np
ours = nbdist.meshes({"data": -1, "model": 2})
x = np.arange(64, dtype=np.float32).reshape(8, 8)
found = []
with jax.set_mesh(ours):
    for layout in ("replicated", "batch", "model", "full"):
        placed = nbdist.place(x, layout)
        whole = nbdist.place(placed, "replicated")
        found.append(nbdist.where(placed) == layout)
        found.append(bool((np.asarray(nbdist.place(whole, jax.local_devices()[1])) == x).all()))
    far = nbdist.place(x, jax.devices()[-1])
    found.append(nbdist.where(far) == jax.devices()[-1])
    found.append(nbdist.where(nbdist.place(x)) == "auto")
    found.append(nbdist.where(nbdist.place(x, nbdist.devices().devices[0].host)) == "cpu")
try:
    nbdist.place(nbdist.place(x, "batch", mesh=ours), "cpu:0")
except nbdist.UsageError as error:
    found.append(str(error)[:27])
found, nbdist.where(ours).axes
"""
    results = cluster.run(cell, strategy="pjrt").results
    assert set(map(len, results.values())) == {len(results[0])}
    for result in results.values():
        flags, axes = eval(result)
        assert flags[:-1] == [True] * 11
        assert flags[-1] == "the array [8, 8] is sharded"
        assert axes["model"].startswith("(2): inside each process")
        assert axes["data"].startswith("(4): between processes of one host; reduces")


def test_place_in_a_step_cell_changes_no_numbers(cluster: nbdist.Cluster) -> None:
    """Compare the losses with and without `place`."""
    cluster.run(
        "import nbdist, numpy as np, jax.numpy as jnp\nxs = np.ones((32, 8), 'f')", strategy="pjrt"
    )
    losses = []
    for wrapped in ("hidden", "nbdist.place(hidden, 'batch')"):
        cluster.run("w = jnp.full((8, 8), 0.1)", strategy="pjrt")
        cell = (
            "import jax\ndef error(w):\n    hidden = jnp.tanh(batch @ w)\n"
            f"    return ({wrapped} ** 2).mean()\n"
            "loss, slope = jax.value_and_grad(error)(w)\nw = w - slope"
        )
        run = cluster.run(cell, strategy="pjrt", step=StepOptions(data="xs", batch=16, epochs=2))
        losses.append(run.loss.tolist())
    assert losses[0] == losses[1]


def test_where_needs_no_current_mesh(mesh: jax.sharding.Mesh) -> None:
    """`where` compares layouts over the mesh of the array."""
    for layout in (*LAYOUTS, PartitionSpec("model"), PartitionSpec(None, "data")):
        assert nbdist.where(nbdist.place(np.ones((8, 8)), layout, mesh=mesh)) == layout
    assert nbdist.where(nbdist.place(np.ones(8), "cpu:1")) != "batch"
    assert nbdist.where(nbdist.place(np.ones(8), "cpu:1")) != None  # noqa: E711 - calls our `__ne__`


def test_auto_may_be_a_leaf_of_a_tree_of_places() -> None:
    tree = {"a": np.ones(4), "b": [np.ones(3), 2.0]}
    places = {"a": "auto", "b": ["cpu:2", "auto"]}
    assert nbdist.where(nbdist.place(tree, places)) == places


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        (7, PartitionSpec("data"), "dimension 0 has 7 elements"),
        (8, PartitionSpec(None, "data"), "the spec has 2 entries, and the array has 1 dimension"),
        ((8, 8), PartitionSpec("data", "data"), "axis 'data' 2 times"),
        (8, PartitionSpec(PartitionSpec.UNCONSTRAINED), "specifies no sharding"),
    ],
)
def test_invalid_specs_are_refused(
    mesh: jax.sharding.Mesh, shape: Any, spec: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        nbdist.place(np.ones(shape), spec, mesh=mesh)
    with pytest.raises(UsageError, match=message), jax.set_mesh(mesh):
        jax.jit(lambda x: nbdist.place(x, spec))(np.ones(shape))


def test_an_object_that_is_not_a_mesh_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a mesh"):
        nbdist.place(np.ones(8), "batch", mesh={"data": 8})  # type: ignore[call-overload]


def test_place_shards_a_constant_of_a_program(mesh: jax.sharding.Mesh) -> None:
    ours = np.ones((8, 8), np.float32)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda x: x + nbdist.place(ours, "batch"))(ours)
    np.testing.assert_array_equal(found, 2 * ours)


def test_place_supports_explicit_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda x: nbdist.place(2 * x, "full"))(jnp.ones((8, 8)))
        assert nbdist.where(found) == "full"


def test_gradients_are_moved_back_from_another_device() -> None:
    x = nbdist.place(np.arange(4, dtype=np.float32), "cpu:0")
    slope = jax.grad(lambda x: (nbdist.place(x, jax.devices()[1]) ** 2).sum())(x)
    np.testing.assert_array_equal(slope, 2 * np.arange(4))


def test_placed_data_is_committed_to_its_device() -> None:
    """Computation stays on the device of the data, also with another default device."""
    loose = jnp.ones(8)
    placed = nbdist.place(loose, jax.devices()[0])
    with jax.default_device(jax.devices()[3]):
        assert (placed + 1).devices() == {jax.devices()[0]}


def test_data_moves_from_pinned_host_memory_to_a_device(mesh: jax.sharding.Mesh) -> None:
    device = jax.devices()[1]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    pinned_array = nbdist.place(np.ones(8, np.float32), pinned)
    assert nbdist.where(pinned_array) == pinned
    assert nbdist.where(nbdist.place(pinned_array, device)) == device


@pytest.mark.parametrize(
    "value", [2**40, np.full(2, 2**40), np.array([-(2**31) - 1]), np.uint64(2**63)]
)
def test_integers_of_more_than_32_bits_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="JAX's integers have 32 bits"):
        nbdist.place(value, "cpu:1")
    assert int(nbdist.place(np.int64(-(2**31)), "cpu:1")) == -(2**31)


@pytest.mark.parametrize(
    "value", [np.ma.masked_array([1.0]), np.ones(2, np.longdouble), np.ones(2, [("a", "f4")])]
)
def test_numpy_types_that_jax_does_not_support_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="JAX does not support"):
        nbdist.place(value, "cpu:1")


def test_unusual_values_over_four_processes(cluster: nbdist.Cluster) -> None:
    """Place NaN, keys, values that differ between processes, and arrays of other processes."""
    cell = """
import jax, jax.numpy as jnp, nbdist, numpy as np
odd = np.array([1.0, np.nan] * 4, np.float32)
w = nbdist.place(odd)
outcomes = [nbdist.where(nbdist.place(odd, "batch")) == "batch", nbdist.where(w) == "replicated"]
outcomes.append(bool(np.isnan(np.asarray((w + jnp.ones(8)).addressable_data(0))).sum() == 4))
sharded = nbdist.place(odd, "batch")
outcomes.append(nbdist.place(sharded) is sharded)
keys = nbdist.place(jax.random.split(jax.random.key(0), 8), "batch")
outcomes.append(nbdist.where(keys) == "batch")
ours = jax.sharding.Mesh(np.array([d for d in jax.devices() if d.process_index < 2]), ("data",))
some = nbdist.place(odd, "replicated", mesh=ours)
for wrong in (lambda: nbdist.place(odd + rank, "batch"), lambda: nbdist.place(some, "batch")):
    try:
        wrong()
    except nbdist.UsageError as error:
        outcomes.append(str(error)[:38])
outcomes
"""
    results = cluster.run(cell, strategy="pjrt").results
    expected = [True] * 5 + [
        "the processes have different values of",
        "the array [8] is on devices of the pro",
    ]
    assert {rank: ast.literal_eval(result) for rank, result in results.items()} == dict.fromkeys(
        range(4), expected
    )
