"""Random kills of workers leave no trace in the numbers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.cluster.collectives import MAX_RECOVERIES_IN_PLACE
from nbdist.records import Saving
from tests import training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANKS = 3
KILLS = 100
EPOCHS = 40
PACE_S = 0.02
GROWTH_BYTES = 60e6
"""Allowed growth of the notebook process: the stored rows of a hundred recoveries."""

CHILDREN_GROWTH_BYTES = 400e6
"""Allowed growth of the child processes.

A worker uses 100 to 300 MB of unshared memory. Ten recoveries in place leave ten coordination
services of about 10 MB."""

SPARE_FILES = 8
"""Files that ZeroMQ may keep open for restarted engines."""


SECOND_KILL_SHARE = 0.25
"""Share of kills with a second kill during the recovery.

With more of them, workers would die faster than nbdist replaces them, and the run would not end."""

SECOND_KILL_DELAY_S = 2.5
"""Longest delay of the second kill in seconds."""


class Killer:
    """Thread that kills a random worker after each checkpoint, sometimes also in a recovery.

    Args:
        cluster: The cluster whose workers to kill.
        seed: Seed of the random choices.
        folder: Checkpoint folder of the run.
        max_kills: Largest number of kills.
    """

    def __init__(self, cluster: nbdist.Cluster, seed: int, folder: Path, max_kills: int) -> None:
        self.kills = 0
        self._max_kills = max_kills
        self._folder = folder
        self._cluster = cluster
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = ""
        while self.kills < self._max_kills and not self._over.wait(self._random.uniform(0.0, 2.0)):
            newest = max((path.name for path in self._folder.glob("step-*")), default="")
            states = {worker.state for worker in self._cluster.workers(measure=False)}
            if newest == last or states != {"busy"}:
                continue
            last = newest
            self._kill()
            if self._random.random() < SECOND_KILL_SHARE and self.kills < self._max_kills:
                self._over.wait(self._random.uniform(0.0, SECOND_KILL_DELAY_S))
                self._kill()

    def _kill(self) -> None:
        """Kill a random live worker in any state; none may be alive during a recovery."""
        pids = list(self._cluster._worker_group.engines.pids().values())
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)
                self.kills += 1


@pytest.fixture
def form(request: pytest.FixtureRequest) -> training.Form:
    return training.FORMS[request.param]


@pytest.fixture
def cluster(form: training.Form) -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=RANKS, framework=form.framework, spares=1) as running:
        yield running


def children_bytes(process: psutil.Process) -> int:
    """Return the unshared memory of all child processes in bytes."""
    total = 0
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += child.memory_full_info().uss
    return total


def set_up(cluster: nbdist.Cluster, form: training.Form, pace_s: float) -> None:
    pace = f"\ndef at(step):\n    time.sleep({pace_s})"
    cluster.run(form.setup + pace, strategy=form.strategy)


@pytest.mark.parametrize(
    ("form", "max_kills", "epochs"),
    [
        ("pjrt step", 2, 15),
        pytest.param("mirrored step", KILLS, EPOCHS, marks=pytest.mark.full),
        pytest.param("pjrt step", KILLS, EPOCHS, marks=pytest.mark.full),
    ],
    indirect=["form"],
)
def test_random_kills_leave_no_trace(
    cluster: nbdist.Cluster, form: training.Form, max_kills: int, epochs: int, tmp_path: Path
) -> None:
    """The bits and the losses are equal; processes, threads, files and memory do not grow."""
    set_up(cluster, form, 0.0)
    undisturbed = form.run(cluster, epochs=epochs, data="batches")
    digest = form.digest_of(cluster)
    process = psutil.Process()
    children = len(process.children(recursive=True))
    kills, number, first_bytes, first_children_bytes = 0, 0, 0, 0
    before = process.num_fds(), threading.active_count()
    while kills < max_kills:
        number += 1
        set_up(cluster, form, PACE_S)
        folder = tmp_path / str(number)
        saving = Saving(folder=str(folder), every_steps=7)
        with Killer(cluster, number, folder, max_kills - kills) as killer:
            run = form.run(
                cluster, epochs=epochs, data="batches", saving=saving, max_heals=10 * max_kills
            )
        kills += killer.kills
        assert form.digest_of(cluster) == digest
        np.testing.assert_array_equal(run.history["loss"], undisturbed.history["loss"])
        first_bytes = first_bytes or process.memory_info().rss
        first_children_bytes = first_children_bytes or children_bytes(process)
    assert process.memory_info().rss - first_bytes < GROWTH_BYTES
    assert children_bytes(process) - first_children_bytes < CHILDREN_GROWTH_BYTES
    children += MAX_RECOVERIES_IN_PLACE  # their coordinators stay until the engines are fresh
    deadline = time.monotonic() + 30
    while len(process.children(recursive=True)) > children and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(process.children(recursive=True)) <= children
    files, threads = process.num_fds(), threading.active_count()
    assert files <= before[0] + SPARE_FILES
    assert threads <= before[1]
