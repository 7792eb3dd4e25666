"""Resize of a cluster between cells, and of a run that continues from its checkpoint."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbdist
from nbdist.errors import ReplayError, UsageError
from nbdist.records import Saving, StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from tests.exact import STEP, losses, setup
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_folders")

SETUP = setup(12)
STEPS = 900
LOSSES = losses(STEPS)
OPTIONS = StepOptions(data="xs", batch=12, steps=STEPS)


@pytest.fixture
def cluster() -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=2, framework="jax") as running:
        yield running


def stop_after(folder: Path, steps: int) -> threading.Thread:
    """Start a thread that requests a stop of the next run after so many rows."""
    before = {run.path for run in stored_runs(folder / "runs")}

    def rows() -> int:
        fresh = [run for run in stored_runs(folder / "runs")[:1] if run.path not in before]
        return max((run.count(table) for run in fresh for table in run.tables()), default=0)

    def stop() -> None:
        assert repeat_until(lambda: rows() > steps, 60)
        with (stored_runs(folder / "runs")[0].path / "stop").open("ab") as file:
            file.write(b"!")

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


@pytest.mark.full
def test_resize_between_cells(cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.run("x = rank")
    cluster.resize(3)
    assert "from 2 workers to 3" in capsys.readouterr().out
    assert cluster.world_size == 3
    assert cluster.run("world_size").results == dict.fromkeys(range(3), "3")
    assert cluster.inspection.lacks("x")
    cluster.run("y = rank")
    cluster.resize(1)
    assert "1 worker is ready, without `x`, `y`, defined in [1]" in capsys.readouterr().out
    assert cluster.run("rank, world_size").results == {0: "(0, 1)"}
    cluster.restart()
    assert cluster.world_size == 1


def test_stopped_run_continues_with_more_and_then_fewer_workers(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """The losses equal those of an uninterrupted run, because the global batch is constant."""
    cluster.run(SETUP)
    saving = Saving(folder=str(tmp_path / "saved"), every_steps=50)
    stopping = stop_after(tmp_path, 60)
    first = cluster.run(STEP, step=OPTIONS, saving=saving)
    stopping.join()
    assert 0 < len(first.loss) < STEPS
    stopping = stop_after(tmp_path, 60)
    second = cluster.resize(3, go_on=True)
    stopping.join()
    assert second is not None
    assert cluster.world_size == 3
    third = cluster.resize(1, go_on=True)
    assert third is not None
    losses = np.concatenate([first.loss, second.loss, third.loss])
    np.testing.assert_array_equal(losses, LOSSES)
    assert cluster.run("float(w.sum())").results == {0: str(LOSSES[-1])}


def test_impossible_resize_is_refused(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    cluster.run("x = 1")
    for hosts, message in (
        (0, "need at least 1 host, got 0"),
        ("gpu1", "a list of names"),
        (10_000, "GB"),
    ):
        with pytest.raises(UsageError, match=message):
            cluster.resize(hosts)
    with pytest.raises(UsageError, match="no run had --checkpoint"):
        cluster.resize(3, go_on=True)
    cluster.run(SETUP, once=True)
    saving = Saving(folder=str(tmp_path / "saved"), every_steps=50)
    short = StepOptions(data="xs", batch=12, steps=4)
    cluster.run(STEP, step=short, saving=saving)
    with pytest.raises(ReplayError):
        cluster.resize(3, go_on=True)
    assert cluster.run("x").results == {0: "1", 1: "1"}, "refused calls change nothing"


def test_resize_magic_adds_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell()
    nbdist.load_ipython_extension(shell)
    try:
        with pytest.raises(nbdist.NoClusterError, match="%dist_resize needs"):
            shell.run_line_magic("dist_resize", "3 hosts")
        shell.run_line_magic("dist_start", "1 --framework jax")
        shell.run_line_magic("dist_resize", "2 hosts")
        assert "2 workers are ready" in capsys.readouterr().out
    finally:
        nbdist.unload_ipython_extension(shell)


@needs_hosts
@pytest.mark.full
def test_resize_with_host_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostname = "import socket\nsocket.gethostname()"
    with Hosts(3) as network:
        monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
        one, two, three = network.names
        with nbdist.Cluster(hosts=[one, two], framework="jax") as cluster:
            cluster.run(SETUP)
            saving = Saving(folder=str(tmp_path / "saved"), every_steps=50)
            stopping = stop_after(tmp_path, 60)
            first = cluster.run(STEP, step=OPTIONS, saving=saving)
            stopping.join()
            with pytest.raises(UsageError, match=r"no-such-host: .*resolve hostname"):
                cluster.resize([one, "no-such-host"])
            assert cluster.run(hostname).results == {0: repr(one), 1: repr(two)}
            last = cluster.resize([two, three, one], go_on=True)
            assert last is not None
            np.testing.assert_array_equal(np.concatenate([first.loss, last.loss]), LOSSES)
            hostnames = cluster.run(hostname).results
            assert hostnames == {0: repr(two), 1: repr(three), 2: repr(one)}
            cluster.resize(1)
            assert cluster.run(hostname).results == {0: repr(two)}
            with pytest.raises(UsageError, match="type the names of all"):
                cluster.resize(4)
            deadline = time.monotonic() + 30
            sshd = {"sshd", "unshare", "ip", "sh"}
            while remaining := [
                process
                for host in (network.each[0], network.each[2])
                for process in host.processes()
                if process.name() not in sshd
            ]:
                assert time.monotonic() < deadline, f"released hosts still run {remaining}"
