"""A run with checkpoints ends with the same bits after its notebook process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from tests import training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANKS = 3
BOUND_S = 60.0
OWNER = """
import sys
import nbdist
from nbdist.records import Saving
from tests import training

form, folder, step = training.FORMS[sys.argv[1]], sys.argv[2], int(sys.argv[3])
cluster = nbdist.Cluster(hosts=int(sys.argv[4]), framework=form.framework)
cluster.run(form.setup, strategy=form.strategy)
form.run(cluster, data="batches")
print("DIGEST", form.digest_of(cluster), flush=True)
cluster.run(form.setup, strategy=form.strategy)
cluster.run(
    f"def at(step):\\n    time.sleep(0.05)\\n    if rank == 0 and step == {step}:\\n"
    f"        open({folder + '/there'!r}, 'w').close()"
)
form.run(cluster, data="batches", saving=Saving(folder=folder + "/kept", every_steps=5))
"""

pytestmark = [
    pytest.mark.usefixtures("own_folders"),
    pytest.mark.full,  # test_interrupted_recovery.py and test_reattach.py kill kernels
]


@contextlib.contextmanager
def owner(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that trains; yield it and the digest of its undisturbed training."""
    program = [sys.executable, "-c", OWNER, *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith("DIGEST "))
        try:
            yield process, next(lines).removeprefix("DIGEST ").strip()
        finally:
            process.kill()


@pytest.mark.parametrize("name", list(training.FORMS))
@pytest.mark.parametrize("step", [1, 12, training.STEPS], ids="step {}".format)
def test_run_continues_after_the_notebook_is_killed(name: str, step: int, tmp_path: Path) -> None:
    with owner(name, str(tmp_path), str(step), str(RANKS)) as (process, undisturbed):
        assert repeat_until((tmp_path / "there").exists, BOUND_S)
        os.kill(process.pid, signal.SIGKILL)
    run = stored_runs(tmp_path / "runs")[0]
    assert repeat_until(lambda: run.state().writer.pid != process.pid, BOUND_S)
    with nbdist.attach() as cluster:
        assert cluster.follow().recoveries == ()
        assert training.FORMS[name].digest_of(cluster) == undisturbed
