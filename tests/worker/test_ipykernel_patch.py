"""A cell with `await` that hangs an unpatched engine, and interrupts of requests."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from nbdist.worker import ipykernel_patch
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

AWAITS = "import asyncio\nawait asyncio.sleep(0.01)"
UNPATCHED_ENGINE = "tests.worker.test_ipykernel_patch:unpatched_engine"


def unpatched_engine(args: dict[str, object], announce: object) -> None:
    """Run an engine of nbdist without the patch."""
    from ipyparallel.engine.app import IPEngine

    IPEngine.launch_instance(argv=args["argv"])


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[nbdist.Cluster]:
    from nbdist.cluster import launcher

    monkeypatch.setattr(launcher, "ENGINE_TARGET", UNPATCHED_ENGINE)
    with clusters.cluster(hosts=1, framework="jax") as running:
        yield running


def test_engine_answers_a_cell_that_awaits(cluster: nbdist.Cluster) -> None:
    answer = cluster._worker_group.engines._view([0]).execute(AWAITS, silent=False, block=False)
    assert answer.wait(10)
    assert answer.status == ["ok"]


@pytest.mark.full
def test_unpatched_engine_never_answers(unpatched: nbdist.Cluster) -> None:
    """If this fails, ipykernel has fixed the issue: remove the patch."""
    answer = unpatched._worker_group.engines._view([0]).execute(AWAITS, silent=False, block=False)
    assert not answer.wait(5)


def survives_many_interrupts(cluster: nbdist.Cluster) -> bool:
    """Send SIGINT repeatedly while the engine handles requests that are not user code.

    Returns:
        True if the engine survived and answered every request.
    """
    pid = cluster.workers()[0].pid
    view = cluster._worker_group.engines._view([0])
    answers = []
    for _ in range(150):
        answers.append(view.apply_async(sum, range(2000)))
        for _ in range(5):
            try:
                os.kill(pid, signal.SIGINT)
            except ProcessLookupError:
                return False
            time.sleep(0.001)
    return all(answer.wait(5) for answer in answers)


def test_interrupts_do_not_lose_replies(cluster: nbdist.Cluster) -> None:
    assert survives_many_interrupts(cluster)
    assert cluster.run("rank", ranks="0").results == {0: "0"}


@pytest.mark.full
def test_interrupts_harm_an_unpatched_engine(
    unpatched: nbdist.Cluster,
) -> None:
    """If this fails, ipykernel has fixed the issue: remove the patch."""
    assert not survives_many_interrupts(unpatched)


def test_other_versions_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipykernel_patch.ipykernel, "__version__", "8.0.0")
    before = dict(vars(ipykernel_patch.IPythonParallelKernel))
    ipykernel_patch.apply()
    assert dict(vars(ipykernel_patch.IPythonParallelKernel)) == before


def test_engine_imports_no_debugger(cluster: nbdist.Cluster) -> None:
    """The import takes a third of a second of each start; users can import it themselves."""
    run = cluster.run("import sys\nany(m.startswith(('debugpy', '_pydev')) for m in sys.modules)")
    assert set(run.results.values()) == {"False"}
    run = cluster.run("from debugpy.server import api\napi.__name__")
    assert set(run.results.values()) == {"'debugpy.server.api'"}
