"""A rank raises, freezes or hangs while the others wait for it in a collective."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import nbdist
from nbdist.records import Beat, Output, StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from tests import clusters
from tests.operations import FIT, STEP, TOTAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.records import AnyEvent

RANKS = 3
ENDS_S = 20.0
"""Seconds until a failed cell ends: usually one, more on busy machines. A hang takes minutes."""

NUMBERS = """
import numpy as np, time
kept = {"a": 1}
def numbers(bad=-1, wait_s=0.0, at=5):
    for i in range(1000):
        if i == at and rank == bad:
            if not wait_s: raise ValueError(f"a bug of the user's at {time.time()}")
            print("hanging", flush=True)
            time.sleep(wait_s)
        yield np.float32(i)
"""
SETUP = {
    "mirrored": f"""{NUMBERS}
import tensorflow as tf, keras
with strategy.scope():
    variable = tf.Variable(0.0)
""",
    "pjrt": f"""{NUMBERS}
import jax, jax.numpy as jnp
variable = jnp.zeros(())
""",
}
BACKENDS = {"mirrored": "tensorflow import strategy", "pjrt": "jax import backend"}
"""Imports of the modules in `nbdist.worker` that abort collectives."""

SPARE = 3
"""Tolerated change of the numbers of threads and files."""

REPEAT_S = 2.2
"""Seconds between two requests: nbdist counts stops of two pages within 2 s as one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=RANKS) as running:
        yield running


@pytest.fixture
def on_hang(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], None]], None]:
    """Call a function twice: when a rank prints that it hangs, and `REPEAT_S` later."""
    deliver = cluster._worker_group.receiver.subscribers.deliver

    def arm(action: Callable[[], None]) -> None:
        def intercept(record: AnyEvent) -> None:
            deliver(record)
            if isinstance(record, Output) and "hanging" in record.text:
                for later_s in (0.2, 0.2 + REPEAT_S):
                    threading.Timer(later_s, action).start()

        monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)

    return arm


def step_options(data: str, count: int = 0) -> StepOptions:
    return StepOptions(data=data, batch=6, steps=count)


def interrupt_on_hang(on_hang: Callable[[Callable[[], None]], None]) -> list[float]:
    """Interrupt the notebook at both calls; return the list that collects their times."""
    times: list[float] = []

    def interrupt() -> None:
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    on_hang(interrupt)
    return times


def check_next_cells(cluster: nbdist.Cluster, strategy: str) -> None:
    """Check that the next step cell runs and that plain Python variables are unchanged."""
    cluster.run(SETUP[strategy].replace("kept = ", "made = "), strategy=strategy)
    run = cluster.run(STEP[strategy], step=step_options("numbers", 4), strategy=strategy)
    assert run.summary.steps == 4
    assert set(cluster.run("kept").results.values()) == {"{'a': 1}"}


@pytest.mark.parametrize(
    "strategy",
    ["mirrored", pytest.param("pjrt", marks=pytest.mark.full)],  # the tests below raise under pjrt
)
@pytest.mark.parametrize("bad_rank", [pytest.param(0, marks=pytest.mark.full), RANKS - 1])
def test_rank_that_raises_ends_the_cell_on_all_ranks(
    cluster: nbdist.Cluster, strategy: str, bad_rank: int
) -> None:
    cluster.run(SETUP[strategy], strategy=strategy)
    pids = [worker.pid for worker in cluster.workers()]
    cluster.run(f"from functools import partial\nbroken = partial(numbers, {bad_rank}, at=300)")
    with pytest.raises(nbdist.CellError, match=f"ValueError on rank {bad_rank}@") as error:
        cluster.run(STEP[strategy], step=step_options("broken"), strategy=strategy)
    assert time.time() - float(error.value.evalue.split()[-1]) < ENDS_S
    assert not any("still running" in note for note in error.value.notes)
    assert any("collectives before the next cell" in note for note in error.value.notes)
    check_next_cells(cluster, strategy)
    assert [worker.pid for worker in cluster.workers()] == pids


@pytest.mark.full  # rare
def test_sockets_of_the_user_stay_open(cluster: nbdist.Cluster) -> None:
    """The abort closes only the sockets of the collectives."""
    cluster.run(
        f"{SETUP['pjrt']}\nfrom functools import partial\nimport socket\n"
        "broken = partial(numbers, 1, at=30)\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    near = socket.create_connection(server.getsockname())\n"
        "    far = server.accept()[0]",
        strategy="pjrt",
    )
    with pytest.raises(nbdist.CellError, match="ValueError on rank 1@"):
        cluster.run(STEP["pjrt"], step=step_options("broken"), strategy="pjrt")
    check = "near.sendall(b'there')\nsocket.socket.recv(far, 5)"
    assert set(cluster.run(check).results.values()) == {"b'there'"}
    cluster.run("near.close(), far.close()")


def test_jax_arrays_survive_an_abort(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrays keep their values from before the failed step; nbdist names those that it lost."""
    cluster.run(
        f"{SETUP['pjrt']}\nfrom functools import partial\nbroken = partial(numbers, 1, at=300)\n"
        "rows = jax.NamedSharding(mesh, jax.P('data'))\n"
        "tree = {'x': jax.make_array_from_process_local_data(rows, np.arange(2.0) + rank)}",
        strategy="pjrt",
    )
    with pytest.raises(nbdist.CellError, match="keeps its arrays"):
        cluster.run(STEP["pjrt"], step=step_options("broken"), strategy="pjrt")
    run = cluster.run(
        "total = jax.jit(jnp.sum, out_shardings=jax.P())(tree['x'])\n"
        "float(total), 'variable' in globals()",
        strategy="pjrt",
    )
    is_kept = "collectives restored; without `variable`" not in capsys.readouterr().out
    assert set(run.results.values()) == {f"(9.0, {is_kept})"}


@pytest.mark.full  # rare
def test_newly_launched_step_does_not_block_the_abort(cluster: nbdist.Cluster) -> None:
    """The abort arrives after the launch of the step and before its report.

    The step is large because JAX waits for small programs itself.
    """
    large = f"product = jnp.ones((99, 99)) @ jnp.ones((99, 99))\n{STEP['pjrt']} + product[0, 0]"
    cluster.run(
        f"{SETUP['pjrt']}\n"
        "from nbdist.worker.jax.step.step import PjrtStep\nstep = PjrtStep.step\n"
        "def slow(self, batch):\n"
        "    if rank == 1: raise ValueError('a bug')\n"
        "    report = step(self, batch)\n"
        "    time.sleep(30)\n"
        "PjrtStep.step = slow",
        strategy="pjrt",
    )
    with pytest.raises(nbdist.CellError, match="ValueError on rank 1@"):
        cluster.run(large, step=step_options("numbers"), strategy="pjrt")
    cluster.run("PjrtStep.step = step")
    check_next_cells(cluster, "pjrt")


@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"])
def test_collectives_are_restored_after_their_own_failure(
    cluster: nbdist.Cluster, strategy: str
) -> None:
    """After a timeout or a lost connection, all later collectives fail as well."""
    cluster.run(SETUP[strategy], strategy=strategy)
    total = TOTAL[strategy]
    abort = f"from nbdist.worker.{BACKENDS[strategy]} as wired\nwired.abort_collectives()\n"
    with pytest.raises(nbdist.CellError, match=r"Gloo|Collective ops is aborted"):
        cluster.run(abort + total, strategy=strategy)
    run = cluster.run(total, strategy=strategy)
    assert set(run.results.values()) == {f"{RANKS:.1f}"}


def test_library_messages_of_an_abort_are_hidden(
    cluster: nbdist.Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SETUP["mirrored"], strategy="mirrored")
    cluster.run("from functools import partial\nbroken = partial(numbers, 1)")
    with pytest.raises(nbdist.CellError):
        cluster.run(STEP["mirrored"], step=step_options("broken"), strategy="mirrored")
    text = "".join(capfd.readouterr())
    assert "Abort" not in text
    assert "abort" in cluster.logs(0).lower()


@pytest.mark.full  # rare
def test_fresh_workers_start_if_collectives_cannot_be_restored(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test makes the TensorFlow server refuse its definition."""
    cluster.run(SETUP["mirrored"], strategy="mirrored")
    pids = {worker.pid for worker in cluster.workers()}
    cluster.run(
        "from functools import partial\nbroken = partial(numbers, 1)\n"
        "from nbdist.worker.tensorflow import strategy as tensorflow_strategy\n"
        "def closed(key):\n    raise RuntimeError('no server')\n"
        "tensorflow_strategy.reopen = closed"
    )
    with pytest.raises(nbdist.CellError):
        cluster.run(STEP["mirrored"], step=step_options("broken"), strategy="mirrored")
    assert cluster.run("'kept' in globals()").results == dict.fromkeys(range(RANKS), "False")
    text = capsys.readouterr().err
    assert (
        "TensorFlow's collectives could not be restored (rank 0: RuntimeError: no server)" in text
    )
    assert "rerun the cells that create them" in text
    assert not {worker.pid for worker in cluster.workers()} & pids
    cluster.run(SETUP["mirrored"], strategy="mirrored")
    check_next_cells(cluster, "mirrored")


@pytest.mark.full  # the tests above raise in a step
def test_rank_that_raises_in_fit_ends_the_cell(cluster: nbdist.Cluster) -> None:
    cluster.run(SETUP["mirrored"], strategy="mirrored")
    with pytest.raises(nbdist.CellError, match="TypeError on rank 1@") as error:
        cluster.run(FIT.format(bad=(1,), epochs=1), strategy="mirrored")
    assert not any("still running" in note for note in error.value.notes)
    check_next_cells(cluster, "mirrored")


@pytest.mark.parametrize("strategy", [pytest.param("mirrored", marks=pytest.mark.full), "pjrt"])
def test_hang_is_reported_and_cancelled(cluster: nbdist.Cluster, strategy: str) -> None:
    """The error names the line of the sleeping rank and the step of the waiting ranks."""
    cluster.run(SETUP[strategy], strategy=strategy)
    cluster.run("from functools import partial\nhanging = partial(numbers, 2, wait_s=600, at=24)")
    started = time.monotonic()
    with pytest.raises(nbdist.WorkerError) as error:
        cluster.run(STEP[strategy], step=step_options("hanging"), strategy=strategy, hang_after_s=3)
    assert time.monotonic() - started < 2 * ENDS_S + 10
    text = str(error.value)
    assert re.match(r"no step for [3-9] s: rank 2@", text)
    assert ", line " in text
    assert "the others wait in a collective of step" in text
    assert "time.sleep(wait_s)" in text
    check_next_cells(cluster, strategy)


LOOP_THEN_WAIT = """
import time
import jax, jax.numpy as jnp, numpy as np
w = jnp.zeros(3)
rows = np.ones((8, 3), "float32")
for x in [rows] * 4:
    loss, g = jax.value_and_grad(lambda w, x: ((x @ w - 1) ** 2).mean())(w, x)
    w = w - 0.1 * g
time.sleep(7)  # like a download
done = True
"""
FIT_THEN_WAIT = """
import time
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((32, 3)), np.ones((32, 1)), batch_size=8, epochs=2, verbose=0)
time.sleep(7)
done = True
"""


@pytest.mark.parametrize(
    ("strategy", "cell"), [("pjrt", LOOP_THEN_WAIT), ("mirrored", FIT_THEN_WAIT)]
)
def test_code_after_the_steps_may_wait(cluster: nbdist.Cluster, strategy: str, cell: str) -> None:
    """After a training, a cell runs like any plain cell: its waits are no hang of a step."""
    cluster.run(cell, strategy=strategy, hang_after_s=3)
    assert all(values["done"] for values in cluster.pull(["done"]).values())


def test_a_long_evaluation_between_steps_is_no_hang(cluster: nbdist.Cluster) -> None:
    """The main thread waits for a computation on another thread."""
    cell = """
import time
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
def evaluate(w):
    end = time.monotonic() + 12
    while time.monotonic() < end: pass
    return w.sum()
w, rows, evaluated = jnp.zeros(3), np.ones((6, 3), "float32"), []
for i in range(8):
    loss, g = jax.value_and_grad(lambda w, x: ((x @ w - 1) ** 2).mean())(w, rows)
    w = w - 0.1 * g
    if i == 4:
        with ThreadPoolExecutor() as pool:
            evaluated.append(float(pool.submit(evaluate, np.asarray(w)).result()))
"""
    cluster.run(cell, strategy="pjrt", hang_after_s=3)
    assert all(len(values["evaluated"]) == 1 for values in cluster.pull(["evaluated"]).values())


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["mirrored", "pjrt"])
def test_second_interrupt_cancels_a_hung_collective(
    cluster: nbdist.Cluster, on_hang: Any, strategy: str
) -> None:
    cluster.run(SETUP[strategy], strategy=strategy)
    cluster.run("from functools import partial\nhanging = partial(numbers, 0, wait_s=600, at=24)")
    cluster.run("import signal\nmask = signal.pthread_sigmask", ranks="0")
    interrupts = interrupt_on_hang(on_hang)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(STEP[strategy], step=step_options("hanging"), strategy=strategy)
    assert len(interrupts) == 2
    assert time.monotonic() - interrupts[1] < 5.0
    check_next_cells(cluster, strategy)


@pytest.mark.full
def test_second_interrupt_kills_an_unresponsive_rank(
    cluster: nbdist.Cluster, on_hang: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank runs C code with SIGINT blocked, outside of collectives."""
    cluster.run(
        f"{SETUP['pjrt']}\nimport ctypes, signal\ndef deaf():\n    for i in range(1000):\n"
        "        if i == 24 and rank == 1:\n            print('hanging', flush=True)\n"
        "            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "            ctypes.CDLL(None).sleep(600)\n        yield np.float32(i)",
        strategy="pjrt",
    )
    pids = {worker.pid for worker in cluster.workers()}
    interrupts = interrupt_on_hang(on_hang)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(STEP["pjrt"], step=step_options("deaf"), strategy="pjrt")
    assert time.monotonic() - interrupts[1] < 30.0
    assert "rank 1 does not respond: nbdist kills it" in capsys.readouterr().err
    assert not pids & {worker.pid for worker in cluster.workers()}
    cluster.run(SETUP["pjrt"], strategy="pjrt")
    check_next_cells(cluster, "pjrt")


@pytest.mark.full  # a minute
def test_twenty_rebuilds_leak_no_resources(cluster: nbdist.Cluster) -> None:
    """Rebuilds of JAX collectives leak no files, threads, shared memory or child processes."""
    count = (
        "import os\n[len(os.listdir(where)) for where in "
        "('/proc/self/fd', '/proc/self/task', '/dev/shm')]"
    )
    cluster.run(f"{SETUP['pjrt']}\nfrom functools import partial", strategy="pjrt")
    fork_server = psutil.Process(cluster.workers()[0].pid).parent()
    assert fork_server is not None
    samples = []
    for _ in range(20):
        cluster.run("broken = partial(numbers, 1, at=3)\nvariable = jnp.zeros(())", strategy="pjrt")
        with pytest.raises(nbdist.CellError, match="ValueError on rank"):
            cluster.run(STEP["pjrt"], step=step_options("broken"), strategy="pjrt")
        results = sorted(cluster.run(count).results.items())
        counts = [int(n) for _, text in results for n in re.findall(r"\d+", text)]
        samples.append((len(fork_server.children()), *counts))
    assert all(late <= early + SPARE for early, late in zip(samples[2], samples[-1], strict=True))


@pytest.mark.full  # a stop becomes the same interrupt
def test_second_stop_request_cancels_a_hung_collective(
    cluster: nbdist.Cluster, on_hang: Any
) -> None:
    cluster.run(SETUP["pjrt"], strategy="pjrt")
    cluster.run("from functools import partial\nhanging = partial(numbers, 0, wait_s=600, at=24)")
    before = {run.id for run in stored_runs(cluster.settings.runs_path)}

    def stop() -> None:
        (run,) = (run for run in stored_runs(cluster.settings.runs_path) if run.id not in before)
        run.ask_to_stop()

    on_hang(stop)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(STEP["pjrt"], step=step_options("hanging"), strategy="pjrt")
    (run,) = (run for run in stored_runs(cluster.settings.runs_path) if run.id not in before)
    assert run.state().status == "stopped"
    check_next_cells(cluster, "pjrt")


@pytest.mark.full
def test_abort_does_not_import_the_other_framework(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank waits for its own thread: neither a signal nor an abort ends that wait."""
    cell = """
import ctypes, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
lock = ctypes.create_string_buffer(256)
libc = ctypes.CDLL(None)
libc.sem_init(lock, 0, 0)
threading.Timer(4, libc.sem_post, [lock]).start()
if rank: raise ValueError
libc.sem_wait(lock)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""
    with clusters.cluster(hosts=2, framework="jax") as running:
        with pytest.raises(nbdist.CellError, match="ValueError"):
            running.run(cell)
        assert repeat_until(lambda: running.workers()[0].state == "idle", 20)
        run = running.run("import sys\nrank, 'tensorflow' in sys.modules")
        assert run.results == {0: "(0, False)", 1: "(1, False)"}
        assert "they are there again" in capsys.readouterr().out


@pytest.mark.full
def test_silent_rank_is_named_and_not_killed(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """C code holds the GIL, so no thread of the process can respond."""
    cell = "import ctypes\nif rank == 1:\n    ctypes.PyDLL(None).sleep(7)\nrank"
    assert cluster.run(cell).results == {0: "0", 1: "1", 2: "2"}
    lines = [line for line in capsys.readouterr().err.splitlines() if "does not respond" in line]
    assert len(lines) == 1
    assert re.fullmatch(
        r"nbdist: rank 1@\S+ does not respond in the cell; its process runs.*", lines[0]
    )


def test_frozen_rank_is_named_and_the_others_are_released(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(SETUP["pjrt"], strategy="pjrt")
    pid = cluster.workers()[1].pid
    deliver, reported = cluster._worker_group.receiver.subscribers.deliver, threading.Event()

    def intercept(record: AnyEvent) -> None:
        deliver(record)
        from_rank_1 = isinstance(record, Beat) and record.rank == 1
        if from_rank_1 and record.step and not reported.is_set():
            reported.set()
            os.kill(pid, signal.SIGSTOP)

    monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)
    try:
        with pytest.raises(nbdist.WorkerError, match=r"rank 1@.* was stopped by a signal after"):
            cluster.run(
                STEP["pjrt"],
                step=StepOptions(data="numbers", batch=6, epochs=10**6),
                strategy="pjrt",
            )
    finally:
        os.kill(pid, signal.SIGCONT)
    states = [worker.state for worker in cluster.workers()]
    assert states[0] == states[2] == "idle"
    cluster.restart()
    cluster.run(SETUP["pjrt"], strategy="pjrt")
    check_next_cells(cluster, "pjrt")
