"""Runs that end early: a stop request, an interrupt, an unreachable rank."""

from __future__ import annotations

import re
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.execution import live_run
from nbdist.records import Rows, StepOptions
from nbdist.telemetry.run_writer import RunDirectory
from tests import clusters
from tests.end_to_end.test_live_run import OPTIONS, SETUP, STEP
from tests.runs import ids, latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nbdist.records import AnyEvent, Command


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=3, framework="jax") as running:
        running.run(SETUP)
        yield running


@pytest.fixture
def request_stop_at(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], None]:
    """Function that requests a stop once, when a rank reports the given step."""
    deliver = cluster._worker_group.receiver.subscribers.deliver

    def arm(step: int) -> None:
        requested = threading.Event()

        def intercept(record: AnyEvent) -> None:
            deliver(record)
            has_reached = isinstance(record, Rows) and record.values and record.last().step >= step
            if has_reached and not requested.is_set():
                requested.set()
                latest(cluster).ask_to_stop()

        monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)

    return arm


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 200])
def test_stop_ends_a_step_cell_at_the_same_step_on_all_ranks(
    cluster: nbdist.Cluster,
    request_stop_at: Callable[[int], None],
    step: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request_stop_at(step)
    run = cluster.run(STEP, step=StepOptions(data="ones", batch=8, epochs=1_000_000))
    last_steps = {m.rank: m.step for m in run.metrics if m.step > 0}
    assert len(set(last_steps.values())) == 1
    assert last_steps[0] >= step
    message = f"nbdist: stopped after step {last_steps[0]:,}; the workers keep their variables"
    assert message in capsys.readouterr().err
    state = latest(cluster).state()
    assert state.status == "stopped"
    assert run.state == state
    assert re.search(
        r": stopped after .*3 workers, .*step \d+.*, loss .* \(last step\)[,>]", repr(run)
    )
    assert {w.status for w in state.workers} == {"interrupted"}
    assert {w.said for w in state.workers} == {""}
    weights = cluster.pull(["weight"])
    assert len({float(objects["weight"][0]) for objects in weights.values()}) == 1


def test_ranks_at_different_steps_stop_at_the_same_step(
    cluster: nbdist.Cluster, request_stop_at: Callable[[int], None]
) -> None:
    """The steps contain no collective, so the other ranks run ahead of rank 1.

    They wait for rank 1 in the comparison of states. A rank that waited for their answer to the
    stop request at that time would wait forever.
    """
    cluster.run(
        "import time\ndef apart():\n    for _ in range(100_000):\n"
        "        time.sleep(0.004 * (rank == 1))\n        yield np.ones(8, 'float32')"
    )
    request_stop_at(199)  # the next step ends with a comparison of states
    run = cluster.run(STEP, step=StepOptions(data="apart"), hang_after_s=8)
    assert latest(cluster).state().status == "stopped"
    assert run.summary.steps >= 200
    weights = cluster.pull(["weight"])
    assert len({float(objects["weight"][0]) for objects in weights.values()}) == 1


@pytest.mark.full  # test_step_interrupt.py covers an interrupt that waits
def test_stop_waits_for_the_end_of_a_long_step(
    cluster: nbdist.Cluster, request_stop_at: Callable[[int], None]
) -> None:
    """The step takes longer than the interval at which nbdist repeats the stop request."""
    cluster.run("import jax, time\ndef nap(value):\n    time.sleep(1.3)\n    return value\n")
    step = (
        "late = jax.pure_callback(nap, jax.ShapeDtypeStruct((), 'float32'), weight[0])\n"
        "weight = weight + batch.mean() + 0 * late\n"
        "loss = weight[0]"
    )
    request_stop_at(1)
    run = cluster.run(step, step=OPTIONS)
    assert len({m.step for m in run.metrics if m.rank == 0 and m.step > 0}) < 16
    assert latest(cluster).state().status == "stopped"
    assert cluster.run("1 + 1").results[2] == "2"


def raising_sigint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that raises SIGINT at the end of each call."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return result

    return wrapper


@pytest.mark.parametrize("name", [pytest.param("begin", marks=pytest.mark.full), "shown"])
def test_interrupt_before_the_send_leaves_no_run(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = ids(cluster)
    monkeypatch.setattr(live_run, name, raising_sigint(getattr(live_run, name)))
    with pytest.raises(KeyboardInterrupt):
        cluster.run(STEP, step=OPTIONS)
    monkeypatch.undo()
    assert ids(cluster) == before
    assert cluster.run("1 + 1").results[1] == "2"


def test_interrupt_while_a_run_closes_is_deferred(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "close", raising_sigint(RunDirectory.close))
    with pytest.raises(KeyboardInterrupt):
        cluster.run(STEP, step=OPTIONS)
    monkeypatch.undo()
    assert latest(cluster).state().status == "finished"
    with latest(cluster).open_shown() as shown:
        assert b"epoch 2" in shown.read()
    assert cluster.last_run.metrics, "the last run keeps its metrics"


def test_cell_that_cannot_be_sent_leaves_no_run(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, before = cluster._worker_group.dispatcher.send, ids(cluster)

    def failing_send(order: Command, ranks: Iterable[int]) -> None:
        if 1 in ranks:
            raise nbdist.WorkerError("rank 1 cannot be reached")
        send(order, ranks)

    monkeypatch.setattr(cluster._worker_group.dispatcher, "send", failing_send)
    with pytest.raises(nbdist.WorkerError, match="cannot be reached"):
        cluster.run("import time\ntime.sleep(60)")
    monkeypatch.undo()
    assert ids(cluster) == before
    assert cluster.run("1 + 1").results[1] == "2"


def test_stop_interrupts_a_plain_cell(
    cluster: nbdist.Cluster, request_stop_at: Callable[[int], None]
) -> None:
    request_stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import time\nwhile True:\n    report(loss=1.0)\n    time.sleep(0.01)")
    assert latest(cluster).state().status == "stopped"
    assert cluster.run("1 + 1").results[0] == "2"
