"""`@autoplace` in four processes of two devices each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

SETUP = """
import concurrent.futures, os
import jax, jax.numpy as jnp, numpy as np
from nbdist.parallel.autoplace import cache as choices
from nbdist.parallel.autoplace.decorator import autoplace

os.environ["NBDIST_PLACEMENTS"] = FOLDER + f"/{rank}.sqlite"
choices.users.cache_clear()

def whole(*shape):
    ones = np.ones(shape, "float32")
    place = jax.NamedSharding(mesh, jax.P())
    return jax.make_array_from_callback(shape, place, lambda index: ones[index])

def work(x):
    return jax.lax.fori_loop(0, 10, lambda _, y: jnp.sort(y + 1, axis=1), x)

def told(function):
    return [(d.chosen, d.made, [t.name for t in d.timed], [t.median_s for t in d.timed])
            for d in function.report().decisions]
"""
SHARED = """
shared = autoplace(work)
x = whole(128, 512)
out = shared(x)
ok = all((np.asarray(shard.data) == 11).all() for shard in out.addressable_shards)
"""
AGAIN = """
again = autoplace(work)
out = again(x)
"""
LOCAL = """
own = autoplace(lambda w, x: jnp.tanh(x @ w))

def call():
    device = jax.local_devices()[1]
    return own(jax.device_put(np.ones((8, 4), "float32"), device), np.ones((16, 8), "float32"))

with concurrent.futures.ThreadPoolExecutor(1) as pool:  # without the mesh of the cell
    out = pool.submit(call).result()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Cluster]:
    folder = tmp_path_factory.mktemp("kept")
    with clusters.cluster(hosts=4, devices_per_host=2, framework="jax") as running:
        running.run(f"FOLDER = {str(folder)!r}\n{SETUP}", strategy="pjrt")
        yield running


def values(cluster: nbdist.Cluster, expression: str) -> list[str]:
    results = cluster.run(expression, strategy="pjrt").results
    return [results[rank] for rank in range(4)]


def test_all_processes_choose_the_same_for_shared_arrays(cluster: nbdist.Cluster) -> None:
    cluster.run(SHARED, strategy="pjrt")
    assert values(cluster, "ok") == ["True"] * 4
    chosen = values(cluster, "[(c, n, m) for c, _, n, m in told(shared)]")
    assert len(set(chosen)) == 1  # the times are equal too: they are those of the slowest process
    assert "batch" in chosen[0]
    assert "one device" not in chosen[0]


@pytest.mark.full
def test_common_decisions_are_reused_and_lost_ones_made_again(
    cluster: nbdist.Cluster,
) -> None:
    cluster.run(SHARED, strategy="pjrt")
    cluster.run(AGAIN, strategy="pjrt")
    assert values(cluster, "told(again) == told(shared)") == ["True"] * 4
    lose = "if rank == 2:\n    os.remove(choices.users().path)\n"
    cluster.run(lose + AGAIN, strategy="pjrt")
    assert values(cluster, "told(again)[0][1] > told(shared)[0][1]") == ["True"] * 4
    assert len(set(values(cluster, "told(again)[0][0]"))) == 1


def test_each_process_decides_for_its_local_arrays(cluster: nbdist.Cluster) -> None:
    cluster.run(LOCAL, strategy="pjrt")
    local = "out.sharding.is_fully_addressable and bool((abs(np.asarray(out) - 1) < 0.01).all())"
    assert values(cluster, local) == ["True"] * 4
    assert all("batch" in names for names in values(cluster, "told(own)[0][2]"))
    assert (
        values(cluster, "own.report().decisions[0].inputs")
        == ["'float32[8,4] on cpu 1, float32[16,8] from the host'"] * 4
    )
