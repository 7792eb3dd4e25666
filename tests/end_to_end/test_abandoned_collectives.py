"""Collectives that only some ranks call in a plain cell: nbdist cancels them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

import nbdist
from nbdist.execution.health import CollectiveDeadlocks
from nbdist.records import CellEnded, RankPosition
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nbdist.execution.sending import CellSender
    from nbdist.records import Command, StrategyName

FULL = pytest.mark.full
BOUND_S = 25.0
REMEDY = 'call the collective on all ranks, not under "if rank == 0"'
SETUP = """
import subprocess, tempfile, threading, time
import numpy as np, tensorflow as tf, keras, jax, jax.numpy as jnp
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
y = x.sum(1, keepdims=True)
def made():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model
def fit(model):
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return np.asarray(model.get_weights()[0])[:, 0].tolist()
"""
MIRRORED = """
model, other = made(), made()
fit(model), fit(other)
mean = keras.metrics.Mean()
mean.update_state(1.0)
on_read = tf.VariableSynchronization.ON_READ
parts = tf.Variable(1.0, synchronization=on_read, aggregation=tf.VariableAggregation.SUM)
@tf.function
def total():
    return strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)
def slow(seconds):
    time.sleep(seconds)
    return np.float32(seconds)
@tf.function
def slow_total(seconds):
    found = total()
    return found + tf.numpy_function(slow, [seconds], tf.float32)
"""
PJRT = """
rows = jax.NamedSharding(mesh, jax.P("data"))
sharded = jax.make_array_from_process_local_data(rows, np.full((1, 1 << 18), rank + 1, np.float32))
summed = jax.jit(lambda a: a.sum(), out_shardings=jax.P())
def slow(seconds):
    time.sleep(float(seconds))
    return np.float32(1)
slept = jax.jit(lambda s: jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), s))
square = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda i, b: b @ b / 1e3, a)[0, 0])
"""

LAUNCHED = """
def launched():
    return summed(sharded + (square(np.ones((1500, 1500), np.float32)) if rank == 1 else 0.0))
if rank == 0: float(launched())
else: launched()
rank
"""
"""Rank 1 ends the cell before it has computed its part of the sum."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2) as running:
        prepare(running)
        yield running


def prepare(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP + MIRRORED, strategy="mirrored")
    cluster.run(PJRT, strategy="pjrt")


def check_cancelled(
    cluster: nbdist.Cluster, cell: str, strategy: StrategyName, lone: int, others: str
) -> nbdist.CellError:
    with clusters.bounded(BOUND_S), pytest.raises(nbdist.CellError) as caught:
        cluster.run(cell, strategy=strategy)
    text = str(caught.value)
    assert caught.value.ename == "LoneCollectiveError"
    assert text.startswith(f"LoneCollectiveError on rank {lone}@")
    assert f"in a collective, but rank {others} ended the cell and cannot join" in text
    assert REMEDY in text
    assert "nbdist restores" in text
    return caught.value


@pytest.mark.parametrize(
    ("lone", "call"),
    [
        pytest.param(0, "model.evaluate(x, y, verbose=0)", marks=FULL),  # the next test does
        pytest.param(1, "model.fit(x, y, verbose=0)", marks=FULL),
        pytest.param(0, "model.predict(x, verbose=0)", marks=FULL),
        pytest.param(0, "float(total())", marks=FULL),
        (1, "strategy.reduce('SUM', strategy.run(lambda: tf.ones(())), axis=None)"),
        pytest.param(0, "float(mean.result())", marks=FULL),
        pytest.param(
            0, "tf.train.Checkpoint(parts=parts).save(tempfile.mkdtemp() + '/parts')", marks=FULL
        ),
    ],
)
def test_tensorflow_collective_on_one_rank_is_cancelled(
    cluster: nbdist.Cluster, lone: int, call: str
) -> None:
    cluster.run("before = model.get_weights()[0].tolist()", strategy="mirrored")
    cell = f"found = rank\nif rank == {lone}:\n    {call}"
    error = check_cancelled(cluster, cell, "mirrored", lone, f"{1 - lone} has")
    assert ", line 3 in a collective" in str(error)
    assert f"rank {1 - lone}: finished" in error.notes
    with clusters.bounded(BOUND_S):
        kept = cluster.run("model.get_weights()[0].tolist() == before", strategy="mirrored")
        summed = cluster.run("float(total())", strategy="mirrored")
    assert kept.results == {0: "True", 1: "True"}
    assert summed.results == {0: "2.0", 1: "2.0"}


def test_model_trains_after_a_cancelled_collective(cluster: nbdist.Cluster) -> None:
    """The reference `other` took no part in the cancelled collective."""
    cell = "fresh = made()\nfit(fresh)\nif rank == 0:\n    fresh.evaluate(x, y, verbose=0)"
    check_cancelled(cluster, cell, "mirrored", 0, "1 has")
    with clusters.bounded(BOUND_S):
        run = cluster.run("np.allclose(fit(fresh), fit(other), rtol=1e-5)", strategy="mirrored")
    assert run.results == {0: "True", 1: "True"}


@pytest.mark.parametrize(
    ("lone", "call", "location"),
    [
        (0, "float(summed(sharded))", "line 3"),
        pytest.param(1, "jax.block_until_ready(summed(sharded))", "line 3", marks=FULL),
        pytest.param(0, "summed(sharded).block_until_ready()", "line 3", marks=FULL),
        (1, "found = summed(sharded + 1)", ""),
    ],
)
def test_jax_collective_on_one_rank_is_cancelled(
    cluster: nbdist.Cluster, lone: int, call: str, location: str
) -> None:
    cell = f"found = rank\nif rank == {lone}:\n    {call}"
    error = check_cancelled(cluster, cell, "pjrt", lone, f"{1 - lone} has")
    assert location in str(error)
    with clusters.bounded(BOUND_S):
        run = cluster.run("float(summed(sharded))", strategy="pjrt")
    assert run.results == dict.fromkeys(range(2), f"{3 * 2.0**18}")


@pytest.mark.full  # rare: the first collective of new workers
def test_export_on_one_rank_is_cancelled(tmp_path: Path) -> None:
    """The first collective of new workers has no arrays that a rank waits for."""
    params = "import jax.numpy as jnp, nbdist\nparams = {'w': jnp.ones(3)}"
    cell = f"if rank == 0:\n    nbdist.export(params, {str(tmp_path / 'model')!r})"
    with clusters.cluster(hosts=2, framework="jax") as fresh:
        fresh.run(params, strategy="pjrt")
        error = check_cancelled(fresh, cell, "pjrt", 0, "1 has")
    assert "line 2" in str(error)
    assert not list(tmp_path.iterdir())


LATE = {
    "lock": """
if rank == 0:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(3, lock.release).start()
    lock.acquire()
rank
""",
    "others": """
if rank == 0:
    time.sleep(3)
    threading.Event().wait(3)
    subprocess.run(["sleep", "3"], check=True)
    until = time.monotonic() + 3
    while time.monotonic() < until: np.linalg.svd(np.ones((300, 300)))
rank
""",
}


@pytest.mark.parametrize("strategy", ["mirrored", pytest.param("pjrt", marks=FULL)])
@pytest.mark.parametrize("reason", ["lock", pytest.param("others", marks=FULL)])
def test_late_rank_is_not_cancelled(
    cluster: nbdist.Cluster, strategy: StrategyName, reason: str
) -> None:
    run = cluster.run(LATE[reason], strategy=strategy)
    assert run.results == {0: "0", 1: "1"}


MULTIPLY = """
if rank == 0:
    a = {made}
    for _ in range({times}): a = a @ a / 1e3
    float(a[0, 0])
rank
"""


@pytest.mark.parametrize(
    ("strategy", "cell"),
    [
        ("mirrored", "slow_total(4.0 if rank == 0 else 0.0)\nrank"),
        ("mirrored", "if rank == 0: model.save({path!r})\nrank"),
        pytest.param(
            "mirrored", MULTIPLY.format(made="tf.ones((1500, 1500))", times=40), marks=FULL
        ),
        ("pjrt", "if rank == 0: slept(4.0).block_until_ready()\nrank"),
        pytest.param("pjrt", LAUNCHED, marks=FULL),  # tests/worker/test_watchdog.py
        pytest.param("pjrt", MULTIPLY.format(made="jnp.ones((1500, 1500))", times=40), marks=FULL),
    ],
)
def test_computing_rank_is_not_cancelled(
    cluster: nbdist.Cluster, tmp_path: Path, strategy: StrategyName, cell: str
) -> None:
    cell = cell.replace("{path!r}", repr(str(tmp_path / "lone.keras")))
    run = cluster.run(cell, strategy=strategy)
    assert run.results == {0: "0", 1: "1"}


@pytest.mark.full
def test_error_names_the_waiting_ranks_of_four() -> None:
    with clusters.cluster(hosts=4) as four:
        prepare(four)
        cell = "if rank in (0, 2):\n    model.evaluate(x, y, verbose=0)"
        error = check_cancelled(four, cell, "mirrored", 0, "1,3 have")
        assert "rank 2: also waited in the cancelled collective" in error.notes
        cell = "if rank == 2:\n    float(summed(sharded))"
        check_cancelled(four, cell, "pjrt", 2, "0-1,3 have")
        with clusters.bounded(BOUND_S):
            run = four.run("float(total())", strategy="mirrored")
        assert run.results == dict.fromkeys(range(4), "4.0")


class RecordingSender:
    """Sender double that records the commands and sends none."""

    number = 1

    def __init__(self, *running: int) -> None:
        self.running = set(running)
        self.commands: list[tuple[Command, Sequence[int]]] = []

    def send_command(self, command: Command, ranks: Sequence[int]) -> None:
        self.commands.append((command, ranks))


def answer(rank: int, clock_s: float, **fields: Any) -> RankPosition:
    defaults: dict[str, Any] = {
        "cell": 1,
        "step": 0,
        "place": "",
        "waits": False,
        "cpu_s": 1.0,
        "stack": "",
    }
    return RankPosition(rank=rank, clock_s=clock_s, **defaults | fields)


ENDED = {1: CellEnded(rank=1, cell=1, status="ok", seconds=1.0)}


def detected(
    ended: dict[int, CellEnded], *answers: RankPosition, running: Sequence[int] = (0,)
) -> dict[int, RankPosition]:
    sender = RecordingSender(*running)
    lone = CollectiveDeadlocks(cast("CellSender", sender), (0, 1, 2)[: len({*running, *ended})])
    for one in answers:
        lone.receive(one)
    return lone.deadlocked(ended)


def waiting(clock_s: float, rank: int = 0, **fields: Any) -> RankPosition:
    return answer(rank, clock_s, **{"collective": "mirrored", "place": "line 3"} | fields)


WAITED = (waiting(5.0), waiting(9.0))
DONE = (answer(1, 105.0), answer(1, 109.0))


def test_idle_wait_is_detected() -> None:
    assert detected(ENDED, *WAITED, *DONE) == {0: WAITED[-1]}


@pytest.mark.parametrize(
    "answers",
    [
        (waiting(5.0), waiting(5.5), *DONE),
        (*WAITED, answer(1, 109.0)),
        (*WAITED, answer(1, 105.0), answer(1, 109.0, process_s=3.0)),
        (*WAITED, answer(1, 105.0, under_way=True), answer(1, 109.0, under_way=True)),
        (*WAITED, waiting(9.1, place="line 4"), *DONE),
        (*WAITED, waiting(9.1, step=1), *DONE),
        (*WAITED, waiting(9.1, cpu_s=1.1), *DONE),
        (*WAITED, waiting(9.1, process_s=3.0), *DONE),
        (answer(0, 5.0), answer(0, 9.0), *DONE),
    ],
)
def test_rank_that_may_continue_is_not_reported(answers: tuple[RankPosition, ...]) -> None:
    assert detected(ENDED, *answers) == {}


def test_wait_is_reported_only_if_all_running_ranks_wait() -> None:
    late = (answer(2, 5.0), answer(2, 9.0))
    assert detected(ENDED, *WAITED, *DONE, *late, running=(0, 2)) == {}
    both = (waiting(5.0, rank=2), waiting(9.0, rank=2))
    assert detected(ENDED, *WAITED, *DONE, *both, running=(0, 2)).keys() == {0, 2}


def test_no_query_is_sent_while_all_ranks_are_in_the_cell() -> None:
    sender = RecordingSender(0, 1)
    assert CollectiveDeadlocks(cast("CellSender", sender), (0, 1)).deadlocked({}) == {}
    assert not sender.commands
