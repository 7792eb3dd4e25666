"""Alerts of real runs. `test_recovery.py` covers those of recoveries."""

from __future__ import annotations

from queue import Queue
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.execution import alerts
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.execution.alerts import Alert

LIMIT_S = 20
SETUP = """
import numpy as np, jax.numpy as jnp
data = np.ones((12, 1), "float32")
data[6:] = np.nan
total = jnp.zeros(1)
"""
STEP = "total = total + jnp.sum(batch)\nloss = jnp.mean(batch)\nloss"


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Queue[Alert]:
    monkeypatch.setattr(alerts, "_functions", {})
    queue: Queue[Alert] = Queue()
    nbdist.on_alert(queue.put)
    return queue


def test_a_loss_that_is_nan_and_the_end_are_alerts(
    cluster: nbdist.Cluster, received: Queue[Alert]
) -> None:
    cluster.run(SETUP)
    cluster.run(STEP, data="data", batch=2, epochs=1, on_nan="warn", shuffle=0, name="nans")
    found = {alert.event: alert for alert in (received.get(timeout=LIMIT_S) for _ in range(2))}
    assert set(found) == {"not finite", "finished"}
    assert "`loss` is nan at step" in found["not finite"].text
    assert {alert.name for alert in found.values()} == {"nans"}


def test_an_error_is_an_alert(cluster: nbdist.Cluster, received: Queue[Alert]) -> None:
    with pytest.raises(nbdist.CellError):
        cluster.run("report(loss=1.0)\nreport(loss=0.5)\nraise ValueError('wrong labels')")
    alert = received.get(timeout=LIMIT_S)
    assert alert.event == "failed"
    assert "ValueError" in alert.text


def test_a_cell_without_reports_has_no_alert(
    cluster: nbdist.Cluster, received: Queue[Alert]
) -> None:
    cluster.run("x = 1")
    cluster.run("report(loss=1.0)")
    assert received.get(timeout=LIMIT_S).event == "finished"
    assert received.empty()
