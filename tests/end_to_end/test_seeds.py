"""Seeds of the random generators, for all workers and for single cells."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import nbdist
from nbdist.cells.parse import parse_cell
from nbdist.cluster.handover import read_handover
from nbdist.errors import UsageError
from nbdist.records import CellOptions, ClusterRequest, Host, RunState, Saving, StepOptions
from nbdist.utils.polling import repeat_until
from tests import clusters
from tests.references import plainly
from tests.runs import new_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED, CELL_SEED = 11, 5
PYTHON_DRAWS = "import random, numpy as np\noutcome = [random.random(), np.random.rand()]\n"
IMPORTS = "import tensorflow as tf, keras"
ALL_DRAWS = (
    PYTHON_DRAWS
    + f"""
{IMPORTS}
outcome += tf.random.normal([2]).numpy().tolist()
outcome += np.asarray(keras.random.normal([2])).tolist()
made = keras.layers.Dense(2)
made.build((None, 2))
outcome += made.get_weights()[0].ravel().tolist()
"""
)
SEEDED = "import keras\nkeras.utils.set_random_seed({seed})\n"


def draw(cluster: nbdist.Cluster, source: str, seed: int | None = None) -> list[float]:
    """Return the numbers that a cell draws, and check that all ranks draw the same."""
    cluster.run(source, seed=seed)
    (own, *others) = cluster.pull(["outcome"]).values()
    assert all(other == own for other in others)
    outcome: list[float] = own["outcome"]
    return outcome


@cache
def on_one_device(program: str) -> list[float]:
    """Return the numbers that a program with TensorFlow draws in one process."""
    numbers: list[float] = plainly({"it": program}, "tensorflow", "keras")["it"]
    return numbers


@pytest.fixture(scope="module")
def tensorflow_cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow", seed=SEED) as running:
        yield running


@pytest.fixture(scope="module")
def jax_cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax", seed=SEED) as running:
        yield running


def test_workers_start_and_restart_with_the_seed(tensorflow_cluster: nbdist.Cluster) -> None:
    first_draws = draw(tensorflow_cluster, ALL_DRAWS)
    assert first_draws == on_one_device(SEEDED.format(seed=SEED) + ALL_DRAWS)
    assert draw(tensorflow_cluster, ALL_DRAWS) != first_draws, (
        "the next cell continues the sequence"
    )
    expected = on_one_device(SEEDED.format(seed=CELL_SEED) + ALL_DRAWS)
    assert draw(tensorflow_cluster, ALL_DRAWS, CELL_SEED) == expected
    assert draw(tensorflow_cluster, ALL_DRAWS, CELL_SEED) == expected
    tensorflow_cluster.restart()
    assert draw(tensorflow_cluster, ALL_DRAWS) == first_draws


def test_restored_collectives_keep_the_generators(
    tensorflow_cluster: nbdist.Cluster,
) -> None:
    cell = "import tensorflow as tf\noutcome = tf.random.normal([2]).numpy().tolist()"
    tensorflow_cluster.run("pass", seed=3)
    first, second = draw(tensorflow_cluster, cell), draw(tensorflow_cluster, cell)
    tensorflow_cluster.run("pass", seed=3)
    assert draw(tensorflow_cluster, cell) == first
    tensorflow_cluster._worker_group.collectives.broken.add("mirrored")
    assert draw(tensorflow_cluster, cell) == second


def test_framework_is_seeded_at_its_import(jax_cluster: nbdist.Cluster) -> None:
    seeded = f"{IMPORTS}, random, numpy as np\ntf.random.set_seed({SEED})\n"
    seeded += f"random.seed({SEED}); np.random.seed({SEED})\n"
    reference = plainly({"own": seeded + ALL_DRAWS}, "jax", "keras", KERAS_BACKEND="jax")["own"]
    assert draw(jax_cluster, ALL_DRAWS) == reference


@pytest.mark.usefixtures("own_folders")
def test_import_of_a_package_does_not_shift_the_generators(tmp_path: Path) -> None:
    """`rich`, which Keras imports, draws a number. Workers may have imported it before the cell."""
    (tmp_path / "drawing.py").write_text("import random\nrandom.random()\n")
    cell = "import keras\n" + PYTHON_DRAWS
    with nbdist.Cluster(hosts=2, framework="jax", seed=SEED) as cluster:
        first_draws = draw(cluster, cell)
        assert first_draws == [random.Random(SEED).random(), np.random.RandomState(SEED).rand()]

        def restart_loads_keras() -> bool:
            cluster.restart()
            return cluster.run("import sys\n'keras' in sys.modules").results[0] == "True"

        assert repeat_until(restart_loads_keras, 30)
        assert draw(cluster, cell) == first_draws
        cluster.restart()
        own_module = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport drawing\n"
        assert draw(cluster, own_module + PYTHON_DRAWS)[0] != first_draws[0]


def test_seed_applies_after_a_resize(
    jax_cluster: nbdist.Cluster,
) -> None:
    jax_cluster.restart()
    first_draws = draw(jax_cluster, PYTHON_DRAWS)
    jax_cluster.resize(3)
    assert draw(jax_cluster, PYTHON_DRAWS) == first_draws
    jax_cluster.resize(2)
    assert read_handover(jax_cluster._folder).request.seed == SEED, (
        "a notebook that attaches reads the same seed"
    )


def test_replaced_worker_draws_the_same_numbers(
    jax_cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """The recovery reruns the set-up cells with their seeds."""
    jax_cluster.restart()
    jax_cluster.run(
        "import os, signal, numpy as np, jax.numpy as jnp\nw = jnp.full((), np.random.rand())"
    )
    jax_cluster.run("v = np.random.rand()", seed=CELL_SEED)
    fault = f"""
def batches():
    for step in range(20):
        mark = {str(tmp_path / "mark")!r}
        if rank == 1 and step == 9 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.full((2, 1), step, "float32")
"""
    jax_cluster.run(fault)
    before = jax_cluster.pull(["w", "v"])
    run = jax_cluster.run(
        "w = w + batch.mean() * v\nloss = w",
        step=StepOptions(data="batches"),
        saving=Saving(folder=str(tmp_path / "kept"), every_steps=4),
        strategy="pjrt",
    )
    assert len(run.recoveries) == 1
    after = jax_cluster.pull(["w", "v"])
    assert after[0]["v"] == after[1]["v"] == before[0]["v"]
    trained = before[0]["w"] + sum(range(20)) * before[0]["v"]
    np.testing.assert_allclose([own["w"] for own in after.values()], trained, rtol=1e-5)


def test_seeds_are_stored_with_the_run(jax_cluster: nbdist.Cluster) -> None:
    jax_cluster.run("report(loss=1.0)", seed=CELL_SEED)
    state = nbdist.runs()[0].state
    assert (state.seed, state.cell_seed) == (SEED, CELL_SEED)
    jax_cluster.run("report(loss=1.0)")
    state = nbdist.runs()[0].state
    assert (state.seed, state.cell_seed) == (SEED, None)
    assert f"seed {SEED}" in jax_cluster.status().title


def test_records_of_older_versions_have_no_seed() -> None:
    state = json.loads(msgspec.json.encode(new_state()))
    del state["seed"], state["cell_seed"]
    assert msgspec.json.decode(json.dumps(state), type=RunState).seed is None
    request = msgspec.json.decode(b'{"hosts": [{}], "frameworks": []}', type=ClusterRequest)
    assert request == ClusterRequest(hosts=(Host(),), frameworks=())


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_invalid_seed_is_refused(seed: int) -> None:
    message = re.escape(f"{seed}: use a whole number")
    with pytest.raises(UsageError, match=message):
        nbdist.Cluster(hosts=1, seed=seed)
    with pytest.raises(UsageError, match=message + " from 0 to 4294967295"):
        parse_cell("pass", CellOptions(seed=seed), number=1, label=1, strategy=None)


DRAW_ON_RANK = """
import random, numpy as np
if rank == {rank}:
    random.random(), np.random.rand(), random.gauss(0, 1), np.random.normal()
"""
MORE_DRAWS = (
    PYTHON_DRAWS
    + """
import tensorflow as tf
outcome += [random.gauss(0, 1), np.random.normal(), *tf.random.normal([2]).numpy().tolist()]
"""
)


RANK_DRAWS = {
    1: SEEDED.format(seed=4) + MORE_DRAWS,
    0: (SEEDED.format(seed=4) + DRAW_ON_RANK.replace("if rank == {rank}:\n    ", "") + MORE_DRAWS),
}


def test_draw_on_one_rank_does_not_shift_the_next_cell(
    tensorflow_cluster: nbdist.Cluster,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next cell continues from rank 0's generators, whichever rank drew numbers."""
    for rank in (1, 0):
        tensorflow_cluster.run("pass", seed=4)
        tensorflow_cluster.run(DRAW_ON_RANK.format(rank=rank))
        capsys.readouterr()
        assert draw(tensorflow_cluster, MORE_DRAWS) == on_one_device(RANK_DRAWS[rank])
        output = capsys.readouterr()
        assert "rank 1 drew other random numbers than rank 0 (NumPy, random)" in (
            output.out + output.err
        )
    tensorflow_cluster.run("tf.random.normal([2])", ranks="1")
    capsys.readouterr()
    draw(tensorflow_cluster, MORE_DRAWS)
    output = capsys.readouterr()
    assert "than rank 0 (TensorFlow)" in output.out + output.err
    draw(tensorflow_cluster, MORE_DRAWS)
    output = capsys.readouterr()
    assert "random numbers" not in output.out + output.err


SHUFFLED = "outcome = [int(i) for i in tf.data.Dataset.range(16).shuffle(16)]\n"
FITTED = """
rows = np.arange(16, dtype="float32").reshape(16, 1)
line = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "tanh", use_bias=False)])
line.compile(keras.optimizers.SGD(0.5), "mse")
line.set_weights([np.ones((1, 1))])
line.fit(rows / 16, rows, batch_size=2, verbose=0)
outcome += line.get_weights()[0].ravel().tolist()
"""
USER_SEEDED = {
    f"{call} {seed}": f"{IMPORTS}, numpy as np\n{call}({seed})\n{SHUFFLED}{FITTED}"
    for call in ("keras.utils.set_random_seed", "tf.random.set_seed")
    for seed in (SEED, CELL_SEED)
}
REPEATED = f"keras.utils.set_random_seed {SEED}", f"tf.random.set_seed {CELL_SEED}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in REPEATED else ())
        for name in USER_SEEDED
    ],
)
def test_seed_set_in_a_cell_gives_the_order_of_one_device(
    tensorflow_cluster: nbdist.Cluster, name: str
) -> None:
    """A cell may also set the seed of the cluster."""
    own = draw(tensorflow_cluster, USER_SEEDED[name])
    assert own == pytest.approx(on_one_device(USER_SEEDED[name]), rel=1e-5)


def test_seed_option_of_a_cell_gives_the_order_of_one_device(
    tensorflow_cluster: nbdist.Cluster,
) -> None:
    own = draw(tensorflow_cluster, f"import tensorflow as tf\n{SHUFFLED}", seed=SEED)
    assert own == on_one_device(USER_SEEDED[f"tf.random.set_seed {SEED}"])[: len(own)]


def test_seed_set_on_rank_0_applies_to_all_ranks(tensorflow_cluster: nbdist.Cluster) -> None:
    """All ranks copy rank 0's generators and the flag that a cell seeded them."""
    tensorflow_cluster.restart()
    shuffled = f"import tensorflow as tf\n{SHUFFLED}"
    unseeded = draw(tensorflow_cluster, shuffled)
    tensorflow_cluster.run(f"if rank == 1: tf.random.set_seed({SEED})")
    assert draw(tensorflow_cluster, shuffled) == unseeded
    tensorflow_cluster.run(f"if rank == 0: tf.random.set_seed({SEED})")
    own = draw(tensorflow_cluster, shuffled)
    assert own == on_one_device(USER_SEEDED[f"tf.random.set_seed {SEED}"])[: len(own)]


UNSEEDED = """
import numpy as np
outcome = [*np.random.default_rng().random(2), *np.random.default_rng().random(2)]
"""


def test_unseeded_generator_is_equal_on_all_ranks(jax_cluster: nbdist.Cluster) -> None:
    jax_cluster.restart()
    numbers = draw(jax_cluster, UNSEEDED)
    assert len({*numbers}) == 4
    assert draw(jax_cluster, f"{UNSEEDED}\n# another cell") != numbers
    seeded = draw(jax_cluster, "import numpy as np\noutcome = [np.random.default_rng(3).random()]")
    assert seeded == [np.random.default_rng(3).random()]
