"""Placement of arrays on real engines with two devices each, under both frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Layout, PlacedArray, Placement

DEFINITIONS = """
import dataclasses, jax, jax.numpy as jnp, numpy as np, equinox as eqx, optax
from flax import nnx
grid = jax.make_mesh((3, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def put(shape, *spec):
    sharding = jax.NamedSharding(grid, jax.P(*spec))
    return jax.jit(lambda: jnp.zeros(shape), out_shardings=sharding)()

cube = put((6, 4, 8), "data", None, "model")
params = {"w": put((12, 5), "data"), "b": put((6,)), "odd": put((7,)), "n": put(()), "no": None}
own = jax.device_put(np.ones((4, 3)), jax.local_devices()[1])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Start three ranks with two devices each; TensorFlow's replicas are the ranks."""
    with clusters.cluster(hosts=3, framework="both", devices_per_host=2) as running:
        running.run(DEFINITIONS, strategy="pjrt")
        yield running


def array_and_layout(placement: Placement, name: str) -> tuple[PlacedArray, Layout]:
    array = next(array for array in placement.arrays if array.name == name)
    return array, placement.layouts[array.layout]


def shards(placement: Placement, layout: Layout) -> list[tuple[int, str, int]]:
    """Return the rank, device name and block of each shard."""
    return [
        (placement.devices[device].rank, placement.devices[device].name, block)
        for device, block in zip(layout.devices, layout.blocks, strict=True)
    ]


def test_array_sharded_over_two_axes(cluster: nbdist.Cluster) -> None:
    placement = cluster.show("cube").placement
    array, layout = array_and_layout(placement, "cube")
    assert (array.shape, array.dtype, array.nbytes) == ((6, 4, 8), "float32", 768)
    assert (layout.kind, layout.parts) == ("sharded", (3, 1, 2))
    assert layout.axes == (("data",), (), ("model",))
    held = cluster.run(
        "[(s.device.id % 2048, tuple(i.start or 0 for i in s.index)) for s in"
        " cube.addressable_shards]"
    ).results
    shown_blocks = {
        rank: sorted(
            (int(name[-1]), (2 * (block // 2), 0, 4 * (block % 2)))
            for r, name, block in shards(placement, layout)
            if r == rank
        )
        for rank in range(3)
    }
    assert {rank: str(blocks) for rank, blocks in shown_blocks.items()} == held
    mesh = placement.meshes[layout.mesh]
    assert (mesh.axes, mesh.sizes, len(mesh.devices)) == (("data", "model"), (3, 2), 6)


def test_pytree_with_replicated_arrays_and_none(cluster: nbdist.Cluster) -> None:
    picture = cluster.show("params")
    placement = picture.placement
    assert [a.name for a in placement.arrays] == [f"params['{n}']" for n in ("w", "b", "odd", "n")]
    kinds = [placement.layouts[a.layout].kind for a in placement.arrays]
    assert kinds == ["sharded", "replicated", "replicated", "replicated"]
    assert placement.notes == ()
    shares = [line.split()[-4:] for line in picture.lines() if line.startswith("  ['b']")]
    assert shares == [["120", "B,", "dim", "0"]]
    assert "could be sharded" in "\n".join(picture.lines())
    assert [line.split()[-2:] for line in picture.lines() if "['odd']" in line] == [["28", "B"]]


def test_show_does_not_copy_data(cluster: nbdist.Cluster) -> None:
    cluster.show("cube", "params")
    run = cluster.run("[getattr(a, '_npy_value', None) is None for a in (cube, params['w'])]")
    assert set(run.results.values()) == {"[True, True]"}


def test_arrays_of_single_ranks(cluster: nbdist.Cluster) -> None:
    cluster.run("host = np.full((2, 3), rank)", strategy="pjrt")
    placement = cluster.show("own", "host").placement
    _, layout = array_and_layout(placement, "own")
    assert shards(placement, layout) == [(rank, "cpu:1", 0) for rank in range(3)]
    assert (layout.kind, layout.owners, layout.copies) == ("one device", 3, 1)
    _, layout = array_and_layout(placement, "host")
    assert shards(placement, layout) == [(rank, "host memory", 0) for rank in range(3)]


def test_per_replica_result_of_strategy(cluster: nbdist.Cluster) -> None:
    cluster.run("each = strategy.run(lambda: jnp.ones((2, 3)))", strategy="pjrt")
    array, layout = array_and_layout(cluster.show("each").placement, "each.stacked")
    assert (array.shape, layout.parts, len(layout.devices)) == ((6, 2, 3), (6, 1, 1), 6)


def test_arrays_in_modules_states_and_records(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])\n"
        "module = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))\n"
        "state = optax.adam(1e-3).init({'w': params['odd']})\n"
        "net = nnx.Linear(6, 3, rngs=nnx.Rngs(0))\n"
        "class Old(nnx.Module, pytree=False):\n"
        "    def __init__(self):\n        self.inner = net\n        self.self = self\n"
        "old = Old()\n"
        "@dataclasses.dataclass\nclass Record:\n    a: object\n    b: int\n"
        "record = Record([params['n']], 3)\n"
        "key = jax.random.key(0)\n"
        "hope = jax.eval_shape(lambda: jnp.zeros((3, 2)))",
        strategy="pjrt",
    )
    for name, paths in {
        "module": ["module.layers[0].weight", "module.layers[0].bias"],
        "state": ["state[0].count", "state[0].mu['w']", "state[0].nu['w']"],
        "net": ["net.bias", "net.kernel"],
        "old": ["old.inner.bias", "old.inner.kernel"],
        "record": ["record.a[0]"],
        "key": ["key"],
    }.items():
        placement = cluster.show(name).placement
        assert [a.name for a in placement.arrays][: len(paths)] == paths
        assert all(placement.layouts[a.layout].devices for a in placement.arrays)
    assert [layout.kind for layout in cluster.show("hope").placement.layouts] == ["abstract"]


def test_donated_array_is_shown_as_deleted(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "gone = put((6,), 'data')\n"
        "with jax.set_mesh(grid):\n    jax.jit(lambda x: x + 1, donate_argnums=0)(gone)",
        strategy="pjrt",
    )
    picture = cluster.show("gone", "cube")
    assert array_and_layout(picture.placement, "gone")[1].kind == "deleted"
    assert "gone, cube: 2 arrays, 768 B" in picture.lines()[0]


def test_shared_array_is_counted_once(cluster: nbdist.Cluster) -> None:
    cluster.run("ring = {'a': cube}\nring['self'] = ring\nring['b'] = [cube, own]")
    placement = cluster.show("ring").placement
    assert [array.name for array in placement.arrays] == ["ring['a']", "ring['b'][1]"]
    assert placement.notes == (
        "ring['self'] is ring: counted once",
        "ring['b'][0] is ring['a']: counted once",
    )


def test_deeply_nested_object_is_shown(cluster: nbdist.Cluster) -> None:
    cluster.run("deep = cube\nfor _ in range(5000):\n    deep = [deep]", ranks="0:3")
    picture = cluster.show("deep")
    assert picture.placement.arrays[0].name == "deep" + "[0]" * 5000
    assert "1 array, 768 B" in picture.lines()[0]


def test_differences_between_ranks_are_noted(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "mixed = {'same': np.ones(2), 'other': np.ones(3 + (rank == 2))}\n"
        "if rank == 1:\n    mixed['more'] = np.ones(5, 'int8')\n"
        "if rank:\n    some = np.ones(4)"
    )
    placement = cluster.show("mixed", "some").placement
    lacking, differing, lost = placement.notes
    assert lacking == "some does not exist on rank 0"
    assert differing == (
        "ranks differ in mixed['other']: float64 of shape (3,), host, on ranks 0-1, "
        "float64 of shape (4,), host, on rank 2"
    )
    assert lost == (
        "ranks differ in mixed['more']: int8 of shape (5,), host, on rank 1, not on ranks 0,2"
    )
    variants = [a for a in placement.arrays if a.name == "mixed['other']"]
    assert [(a.shape, a.ranks) for a in variants] == [((3,), (0, 1)), ((4,), (2,))]
    same = array_and_layout(placement, "mixed['same']")
    assert (same[0].ranks, len(same[1].devices)) == ((), 3)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("nothing",), nbdist.TransferError, "no such name on the workers: nothing"),
        (("cube.nothing",), nbdist.TransferError, "no such name on the workers: cube.nothing"),
        (("rank", "cube"), nbdist.UsageError, r"no arrays in `rank` \(int\): name an array"),
        (("grid", "jax"), nbdist.UsageError, r"no arrays in `grid` \(Mesh\), `jax` \(module\)"),
        (("cube[0]",), nbdist.UsageError, r"'cube\[0\]': type names as in %dist_show"),
        ((), nbdist.UsageError, "no name given"),
    ],
)
def test_unsupported_names_are_refused(
    cluster: nbdist.Cluster, names: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cluster.show(*names)


# TensorFlow and Keras.

KERAS = """
import keras
keras.utils.set_random_seed(1)
NAME = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="hidden")])
NAME.compile("adam", "mse")
NAME.optimizer.build(NAME.trainable_variables)
"""


def test_model_under_mirrored_strategy(cluster: nbdist.Cluster) -> None:
    cluster.run(KERAS.replace("NAME", "mirrored"), strategy="mirrored")
    placement = cluster.show("mirrored", "mirrored.optimizer").placement
    array, layout = array_and_layout(placement, "mirrored/hidden/kernel")
    assert (array.shape, array.nbytes, layout.kind, layout.copies) == ((4, 6), 96, "mirrored", 3)
    assert shards(placement, layout) == [(rank, "cpu:0", 0) for rank in range(3)]
    _, layout = array_and_layout(placement, "mirrored.optimizer/sequential_hidden_kernel_momentum")
    assert layout.kind == "mirrored"


def test_tensorflow_variables_and_tensors(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "import tensorflow as tf\n"
        "each = strategy.run(tf.function(lambda: tf.ones((2, 3))))\n"
        "counter = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,"
        " aggregation=tf.VariableAggregation.SUM)\n"
        "class Module(tf.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n        self.v = [tf.Variable([1.0])]\n"
        "tensors = {'t': tf.ones(3), 's': tf.constant(['a']), 'm': Module(),\n"
        "           'r': tf.ragged.constant([[1], [2, 3]]), 'd': tf.data.Dataset.range(3)}",
        strategy="mirrored",
    )
    placement = cluster.show("each", "counter", "tensors").placement
    kinds = {a.name: placement.layouts[a.layout].kind for a in placement.arrays}
    assert kinds == {
        "each": "one device",
        "counter": "per replica",
        "tensors['t']": "one device",
        "tensors['s']": "one device",
        "tensors['m'].v[0]": "mirrored",
        "tensors['r'][0]": "one device",
        "tensors['r'][1]": "one device",
    }
    assert array_and_layout(placement, "counter")[1].owners == 3
    assert array_and_layout(placement, "tensors['s']")[0].nbytes == 0


@pytest.mark.full
def test_keras_model_under_jax() -> None:
    """Start engines without TensorFlow: a process chooses Keras's backend once."""
    with clusters.cluster(hosts=2, framework="jax") as cluster:
        cluster.run(KERAS.replace("NAME", "model"), strategy="pjrt")
        placement = cluster.show("model", "model.optimizer").placement
        array, layout = array_and_layout(placement, "model/hidden/kernel")
        assert (array.shape, array.nbytes, layout.kind) == ((4, 6), 96, "replicated")
        assert shards(placement, layout) == [(rank, "cpu:0", 0) for rank in range(2)]
        assert "model.optimizer/sequential_hidden_kernel_velocity" in {
            array.name for array in placement.arrays
        }
        cluster.run("layer = keras.layers.Dense(3)", strategy="pjrt")
        with pytest.raises(nbdist.UsageError, match=r"no arrays in `layer` \(Dense\)"):
            cluster.show("layer")
