"""Pull of large and sharded arrays, in parts of each rank."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import nbdist
from nbdist.errors import TransferError
from nbdist.worker.remote.offers import SLAB_BYTES
from tests import clusters

pytestmark = pytest.mark.processes

ROWS, COLUMNS = 1028, 3000
"""A shape of more than a slab in each rank's shard of float64."""

VALUE = np.arange(ROWS * COLUMNS, dtype="f8").reshape(ROWS, COLUMNS)
SHARDED = f"""
import jax, jax.numpy as jnp, numpy as np
both = jax.make_mesh((2, 2), ("a", "b"))
P = jax.P
value = np.arange({ROWS * COLUMNS}, dtype="f4").reshape({ROWS}, {COLUMNS})

def place(spec, array=value):
    sharding = jax.NamedSharding(both, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

tree = {{
    "rows": place(P("a")),
    "columns": place(P(None, "a")),
    "blocks": place(P("a", "b")),
    "all": place(P(("a", "b"))),
    "replicated": place(P()),
    "brain": place(P("a"), jnp.asarray(value, jnp.bfloat16)),
    "small": place(P("a"), np.arange(4)),
    "twice": [place(P("b", "a"))] * 2,
    "own": jax.device_put(np.full({COLUMNS * 100}, rank, "f4"), jax.local_devices()[0]),
    "whole": np.asfortranarray(value.astype("f8") + rank),
    "step": 7,
}}
"""


def test_shards_of_all_ranks_become_the_array_of_one_device() -> None:
    with clusters.cluster(2, framework="jax", devices_per_host=2) as cluster:
        cluster.run(SHARDED)
        pulled = cluster.pull(["tree"])
        one = cluster.pull(["tree"], ranks="1")[1]["tree"]
    value = VALUE.astype("f4")
    for rank, tree in ((0, pulled[0]["tree"]), (1, pulled[1]["tree"]), (1, one)):
        for name in ("rows", "columns", "blocks", "all", "replicated"):
            np.testing.assert_array_equal(tree[name], value, name)
            assert tree[name].dtype == np.float32
        assert tree["brain"].dtype == ml_dtypes.bfloat16
        assert tree["brain"].tobytes() == value.astype(ml_dtypes.bfloat16).tobytes()
        assert tree["small"].tolist() == [0, 1, 2, 3]
        assert tree["twice"][0] is tree["twice"][1]
        np.testing.assert_array_equal(tree["twice"][0], value)
        np.testing.assert_array_equal(tree["own"], np.full(COLUMNS * 100, float(rank), "f4"))
        np.testing.assert_array_equal(tree["whole"], VALUE + rank)
        assert tree["whole"].flags.f_contiguous
        assert tree["step"] == 7
        assert all(a.flags.writeable for a in tree.values() if isinstance(a, np.ndarray))
    assert pulled[0]["tree"]["rows"] is pulled[1]["tree"]["rows"], "it is in memory once"


def test_arrays_of_numpy_arrive_bit_for_bit() -> None:
    code = (
        "import numpy as np, ml_dtypes\n"
        f"base = np.arange({VALUE.size}, dtype='f8').reshape{VALUE.shape}\n"
        "found = [base, np.asfortranarray(base), base[::2, ::3], base.T[:, ::-1],\n"
        "    base.astype(ml_dtypes.bfloat16), base.astype('>i4'), base.astype('M8[ns]'),\n"
        "    np.zeros(10**6, [('a', 'f4'), ('b', 'i8')]), base.reshape(-1, 2, 3, order='F'),\n"
        f"    np.zeros((1, {2 * SLAB_BYTES}), 'u1'), np.array(3.0), np.zeros((0, 2)),\n"
        "    np.array([None, 'a'] * 10**6, object)]"
    )
    with clusters.cluster(2, framework="jax", devices_per_host=2) as cluster:
        cluster.run(code)
        found = cluster.pull(["found"], ranks="0")[0]["found"]
    here: dict[str, list[np.ndarray]] = {}
    exec(code, here)
    for one, other in zip(found, here["found"], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype == object:
            assert one.tolist() == other.tolist()
        else:
            assert one.tobytes() == other.tobytes()
        contiguous = other.flags.c_contiguous or other.flags.f_contiguous
        assert not contiguous or one.flags.c_contiguous == other.flags.c_contiguous
        assert one.flags.writeable


def test_random_keys_are_refused_with_advice() -> None:
    with clusters.cluster(2, framework="jax", devices_per_host=2) as cluster:
        cluster.run("import jax\nkey = jax.random.key(0)")
        with pytest.raises(TransferError, match="key_data"):
            cluster.pull(["key"])


@pytest.mark.usefixtures("own_folders")
def test_a_rank_that_dies_in_a_pull_ends_it_with_its_name() -> None:
    """It dies when the notebook asks for the elements of its array."""
    with nbdist.Cluster(hosts=2, framework="none") as cluster:
        cluster.run(
            "import os\nimport numpy as np\nfound = np.zeros(10**7)\n"
            "from nbdist.worker.remote import offers\n"
            "if rank == 1:\n"
            "    offers._parts = lambda value: os.kill(os.getpid(), 9)"
        )
        with pytest.raises(TransferError, match="rank 1 is dead"):
            cluster.pull(["found"])
        assert cluster.pull(["found"], ranks="0")[0]["found"].shape == (10**7,)


@pytest.mark.full  # TensorFlow
def test_variables_of_tensorflow_arrive_as_arrays() -> None:
    with clusters.cluster(2, framework="tensorflow") as cluster:
        cluster.run(
            "import tensorflow as tf\nlarge = tf.Variable(tf.range(10**6))\n"
            "texts = tf.constant(['a', 'b'])\nbrain = tf.cast(large, tf.bfloat16)"
        )
        found = cluster.pull(["large", "texts", "brain"])
    for objects in found.values():
        np.testing.assert_array_equal(objects["large"], np.arange(10**6, dtype="i4"))
        assert objects["texts"].tolist() == [b"a", b"b"]
        assert objects["brain"].dtype == ml_dtypes.bfloat16
