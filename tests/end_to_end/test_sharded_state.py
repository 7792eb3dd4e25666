"""Steps with state that is sharded over processes: checks, checkpoints, user shardings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import Planning, Saving, StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

SET_UP = """
import jax, jax.numpy as jnp, numpy as np
keys = jax.random.split(jax.random.key(0), 2)
params = {
    "up": jax.random.normal(keys[0], (32, 64)) * 0.1,
    "down": jax.random.normal(keys[1], (64, 64)) * 0.1,
}
moments = jax.tree.map(jnp.zeros_like, params)
random = np.random.default_rng(0)
train = random.normal(size=(64, 32)).astype("f4"), random.normal(size=(64, 64)).astype("f4")
"""
STEP = """
x, y = batch
def error(weights):
    return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - y) ** 2)
loss, slopes = jax.value_and_grad(error)(params)
moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, slopes)
params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
loss
"""
EPOCHS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Cluster in which a model axis of 2 is inside a worker and one of 4 spans both."""
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=2) as running:
        yield running


def train(
    cluster: nbdist.Cluster, fixed: dict[str, int], set_up: str = SET_UP, **options: Any
) -> nbdist.Run:
    if set_up:
        cluster.run(set_up, strategy="pjrt")
    run_options = {name: options.pop(name) for name in ("saving", "guard") if name in options}
    chosen = {"batch": 16, "epochs": EPOCHS, "planning": Planning(fixed=fixed), **options}
    return cluster.run(
        STEP, strategy="pjrt", step=StepOptions(data="train", **chosen), **run_options
    )


@pytest.fixture(scope="module")
def whole(cluster: nbdist.Cluster) -> np.ndarray:
    """Losses of a run with the whole state on every device."""
    run = train(cluster, {})
    assert run.plan is not None
    assert run.plan.title == "data 4"
    return run.loss


SHARDED = {"data": 2, "model": 2, "zero": 3}


def test_sharded_step_is_checked_and_guarded(cluster: nbdist.Cluster, whole: np.ndarray) -> None:
    run = train(cluster, SHARDED, check=True, guard=1)
    np.testing.assert_allclose(run.loss, whole, rtol=1e-5)
    assert run.checked is not None
    assert {"params['up']", "moments['down']"} <= {d.name for d in run.checked.differences}


@pytest.mark.parametrize("degrees", [{"model": 4}, pytest.param({}, marks=pytest.mark.full)])
def test_run_resumes_with_another_layout(
    cluster: nbdist.Cluster, whole: np.ndarray, tmp_path: Path, degrees: dict[str, int]
) -> None:
    saving = Saving(folder=str(tmp_path), every_steps=2)
    first = train(cluster, SHARDED, epochs=2, saving=saving)
    np.testing.assert_allclose(first.loss, whole[: len(first.loss)], rtol=1e-5)
    resumed = Saving(folder=str(tmp_path), every_steps=2, resume=True)
    run = train(cluster, degrees, set_up="", saving=resumed)
    np.testing.assert_allclose(run.loss[-1], whole[-1], rtol=1e-5)
    assert run.plan is not None
    for tensor in run.plan.tensors:
        if tensor.role != "batch" and tensor.shape:
            assert spec_of(cluster, tensor.path) == formatted(tensor.spec)


def test_user_sharding_is_kept(cluster: nbdist.Cluster, whole: np.ndarray) -> None:
    user_sharding = (
        "\nrows = jax.NamedSharding(strategy.mesh, jax.P(None, 'data'))\n"
        "params['down'] = jax.device_put(params['down'], rows)\n"
    )
    run = train(cluster, {}, set_up=SET_UP + user_sharding)
    np.testing.assert_allclose(run.loss, whole, rtol=1e-5)
    assert spec_of(cluster, "params['down']") == "P(None, 'data')"
    assert spec_of(cluster, "params['up']") == "P()"
    assert run.plan is not None
    assert run.compiled is not None
    assert run.plan.memory.arguments == run.compiled.arguments


def spec_of(cluster: nbdist.Cluster, path: str) -> str:
    """Return the partition spec of an array from its actual placement."""
    placement = cluster.show(path.partition("[")[0]).placement
    (found,) = [array for array in placement.arrays if array.name == path]
    return placement.layouts[found.layout].spec


def formatted(spec: tuple[tuple[str, ...], ...]) -> str:
    """Format a partition spec as JAX does."""
    words = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in spec]
    while words and words[-1] == "None":
        words.pop()
    return f"P({', '.join(words)}{',' if len(words) == 1 else ''})"
