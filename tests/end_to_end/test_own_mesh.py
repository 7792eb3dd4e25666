"""Cells with a mesh of the user: plain cells, `jax.set_mesh`, and step cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from nbdist.records import Planning, StepOptions
from tests import clusters
from tests.clusters import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
xs, ys = rng.normal(size=(32, 4)).astype("f4"), rng.normal(size=(32, 2)).astype("f4")
train, start = (xs, ys), rng.normal(size=(4, 2)).astype("f4")
"""
MESHES = """
explicit = jax.make_mesh((jax.device_count(),), ("i",))
auto = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))
grid = jax.make_mesh((jax.device_count() // 2, 2), ("rows", "columns"))
auto_grid = jax.make_mesh(
    (jax.device_count() // 2, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
"""
STEP = """
x, y = batch
loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
w = w - 0.1 * gradient
"""
OPTIONS = StepOptions(data="train", batch=8)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="jax") as running:
        running.run(SETUP)
        running.run(MESHES)
        yield running


@pytest.fixture(autouse=True)
def without_mesh(cluster: nbdist.Cluster) -> Iterator[None]:
    yield
    cluster.run("jax.set_mesh(None);")


def trained(weights: Any = 1.0) -> np.ndarray:
    """Return the weights that four steps of gradient descent give in NumPy.

    Args:
        weights: factor of each row in the loss.
    """
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(32, 4)).astype("f4"), rng.normal(size=(32, 2)).astype("f4")
    w = rng.normal(size=(4, 2)).astype("f4")
    for first in range(0, 32, 8):
        x, y = xs[first : first + 8], ys[first : first + 8]
        w = w - 0.1 * 2 * x.T @ (weights * (x @ w - y)) / y.size
    return w


def pulled(cluster: nbdist.Cluster, name: str) -> list[Any]:
    return [objects[name] for objects in cluster.pull([name]).values()]


# Plain cells.


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.full)])
def test_cell_computes_on_a_mesh_of_its_own(cluster: nbdist.Cluster, kind: str) -> None:
    cluster.run(
        f"m = jax.make_mesh((jax.device_count(),), ('i',), axis_types={kind}.axis_types)\n"
        "a = jax.device_put(np.arange(8.), NamedSharding(m, P('i')))\n"
        "total = jnp.sin(a).sum() + jnp.ones(3).sum()"
    )
    for total in pulled(cluster, "total"):
        assert total == pytest.approx(np.sin(np.arange(8.0)).sum() + 3, rel=1e-5)


def test_plain_cell_has_no_context_mesh(cluster: nbdist.Cluster) -> None:
    cell = "a = jnp.arange(4.0)\na.committed, len(a.devices()), jax.sharding.get_mesh().empty"
    assert evaluate(cluster, cell) == "(False, 1, True)"
    assert evaluate(cluster, "jax.device_put(a, jax.local_devices()[0]).sum().item()") == "6.0"


def test_cell_that_uses_the_mesh_of_nbdist_has_it(cluster: nbdist.Cluster) -> None:
    devices = evaluate(cluster, "a = jnp.arange(4.0)\nlen(a.devices()) == mesh.size")
    assert devices == "True"
    assert evaluate(cluster, "jax.sharding.get_mesh().empty") == "True"


def test_mesh_that_is_set_stays_in_force(cluster: nbdist.Cluster) -> None:
    cluster.run("jax.set_mesh(explicit);")
    assert evaluate(cluster, "jax.sharding.get_mesh() == explicit") == "True"
    cluster.run("a = jax.device_put(np.arange(8.), P('i'))\nb = jnp.sin(a)")
    assert evaluate(cluster, "jax.typeof(b).sharding.spec") == "P('i',)"
    assert evaluate(cluster, "strategy.num_replicas_in_sync == mesh.size") == "True"
    assert evaluate(cluster, "jax.sharding.get_mesh() == explicit") == "True"
    cluster.run("w = jnp.asarray(start)")
    cluster.run(STEP, step=OPTIONS)
    assert evaluate(cluster, "jax.sharding.get_mesh() == explicit == w.sharding.mesh") == "True"


def test_meshes_survive_restored_collectives(cluster: nbdist.Cluster) -> None:
    ours = evaluate(cluster, "str(strategy.mesh == mesh)")
    assert ours == "'True'"
    cluster.run("own, mesh = mesh, explicit\njax.set_mesh(mesh);")
    cluster.run("a = jax.device_put(np.arange(8.), P('i'))")
    fails = "if rank == 0:\n    raise ValueError('first')\nfloat(jnp.sin(a).sum())"
    with pytest.raises(nbdist.CellError, match="first"):
        cluster.run(fails)
    is_own = "jax.sharding.get_mesh() == mesh == explicit == a.sharding.mesh"
    assert evaluate(cluster, f"{is_own}, float(a.sum())") == "(True, 28.0)"
    cluster.run("mesh = own")


def test_initialize_returns_with_a_note(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("jax.distributed.initialize()\njax.distributed.initialize('host:1', 2, 0)")
    processes = cluster.world_size
    note = f"jax.distributed.initialize: already done, {processes} processes with {processes}"
    assert capsys.readouterr().out.count(note) == 1


# Step cells.


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ("explicit", "P('i')"),
        ("auto_grid", "P(None, 'columns')"),
        *(
            pytest.param(mesh, spec, marks=pytest.mark.full)
            for mesh, spec in (
                ("explicit", "P()"),
                ("auto", "P()"),
                ("auto", "P('i')"),
                ("grid", "P(None, 'columns')"),
            )
        ),
    ],
)
def test_step_uses_the_mesh_of_its_arrays(cluster: nbdist.Cluster, mesh: str, spec: str) -> None:
    cluster.run(f"own = NamedSharding({mesh}, {spec})\nw = jax.device_put(start, own)")
    bare = f"w = jax.device_put(w, jax.{spec})\n" if mesh == "explicit" else ""
    cluster.run(STEP + bare, step=OPTIONS)
    assert evaluate(cluster, "w.sharding == own") == "True"
    for w in pulled(cluster, "w"):
        np.testing.assert_allclose(w, trained(), rtol=1e-5, atol=1e-6)
    assert evaluate(cluster, "jax.sharding.get_mesh().empty") == "True"


def test_rows_keep_their_places_on_a_mesh_in_another_order(cluster: nbdist.Cluster) -> None:
    """A mesh along a torus of TPUs does not have the devices in the order of processes."""
    cluster.run(
        "reverse = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ('i',), "
        "axis_types=(AxisType.Auto,))\n"
        "w = jax.device_put(start, NamedSharding(reverse, P()))"
    )
    by_place = STEP.replace("(x @ w - y) ** 2", "jnp.arange(8.)[:, None] * (x @ w - y) ** 2")
    cluster.run(by_place, step=OPTIONS)
    expected = trained(np.arange(8.0)[:, None])
    for w in pulled(cluster, "w"):
        np.testing.assert_allclose(w, expected, rtol=1e-5)


def test_step_is_checked_on_one_device(cluster: nbdist.Cluster) -> None:
    cluster.run("w = jax.device_put(start, NamedSharding(explicit, P()))")
    options = StepOptions(data="train", batch=8, check=True)
    cluster.run("w = jax.reshard(w, NamedSharding(explicit, P()))" + STEP, step=options)
    for w in pulled(cluster, "w"):
        np.testing.assert_allclose(w, trained(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            "jax.device_put(np.ones(8, 'f4'), NamedSharding(mesh, P('data')))",
            r"`w` over the mesh \(i: \d; Explicit\) and `scale` over the mesh \(data: \d; Auto\)",
        ),
        pytest.param(
            "jax.device_put(np.ones(8, 'f4'), NamedSharding(auto, P()))",
            r"`w` over the mesh \(i: \d; Explicit\) and `scale` over the mesh \(i: \d; Auto\)",
            marks=pytest.mark.full,
        ),
    ],
    ids=["ours", "two"],
)
def test_mixed_meshes_are_refused(cluster: nbdist.Cluster, scale: str, message: str) -> None:
    cluster.run("w = jax.device_put(start, NamedSharding(explicit, P()))")
    cluster.run(f"scale = {scale}")
    with pytest.raises(nbdist.CellError, match=message):
        cluster.run(STEP + "loss = loss * scale.mean()", step=OPTIONS)


def test_options_of_the_planner_are_refused(cluster: nbdist.Cluster) -> None:
    cluster.run("w = jax.device_put(start, NamedSharding(explicit, P()))")
    options = StepOptions(data="train", batch=8, planning=Planning(fixed={"zero": 3}))
    with pytest.raises(nbdist.CellError, match=r"\(i: \d; Explicit\).*plans no layout"):
        cluster.run(STEP, step=options)


PLACED = """
values = np.array([0.1, np.nan, 0.3, 0.4] * jax.device_count())
placed = [jax.device_put(values, NamedSharding(explicit, spec)) for spec in (P("i"), P())]
scalar = jax.device_put(0.1, NamedSharding(explicit, P()))
"""


def test_values_of_64_bits_and_nan_are_placed(cluster: nbdist.Cluster) -> None:
    cluster.run(PLACED)
    first = "[round(float(value), 6) for value in np.asarray(a.addressable_data(0)).ravel()[:2]]"
    found = evaluate(cluster, f"[{first} for a in (*placed, scalar)]")
    assert found == "[[0.1, nan], [0.1, nan], [0.1]]"


def test_values_that_differ_are_refused(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match="is not the same on each process"):
        cluster.run("jax.device_put(np.array([0.1 + rank]), NamedSharding(explicit, P()))")


FIRST_DEVICE = {
    "context": "with jax.default_device(jax.devices()[0]):\n    first = jnp.arange(4.0) * 2\n",
    "option": (
        "jax.config.update('jax_default_device', jax.devices('cpu')[0])\n"
        "first = jnp.arange(4.0) * 2\n"
        "jax.config.update('jax_default_device', None)\n"
    ),
    "device_put": "first = jax.device_put(np.arange(4.0) * 2, jax.devices()[0])\n",
    "tree": "first = jax.device_put([jnp.arange(4.0) * 2], device=jax.devices()[0])[0]\n",
    "asarray": "first = jnp.asarray(np.arange(4.0) * 2, device=jax.devices()[0])\n",
    "zeros": "first = jnp.zeros(4, device=jax.devices()[0]) + jnp.arange(4.0) * 2\n",
    "linspace": "first = jnp.linspace(0, 6, 4, device=jax.devices()[0])\n",
}
USES = {"context": "default ", "option": "default "}


@pytest.mark.parametrize("form", FIRST_DEVICE)
def test_device_of_rank_0_is_the_own_one_on_each_rank(
    cluster: nbdist.Cluster, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(f"{FIRST_DEVICE[form]}print(first)")
    assert f"each rank uses its own {USES.get(form, '')}device: " in capsys.readouterr().out
    for first in pulled(cluster, "first"):
        np.testing.assert_array_equal(first, [0, 2, 4, 6])
    own = "first.devices() == {jax.local_devices()[0]}"
    assert set(cluster.run(own).results.values()) == {"True"}


@pytest.mark.full  # a test of JAX
def test_patch_of_device_put_is_needed(cluster: nbdist.Cluster) -> None:
    check = "multihost_utils.assert_equal.__wrapped__"
    for values in ("[0.1]", "[np.nan]"):
        with pytest.raises(nbdist.CellError, match="not equal"):
            cluster.run(f"""
from jax.experimental import multihost_utils
{check}(np.array({values}), "not equal")
""")
