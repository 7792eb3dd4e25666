"""Number of files that a warm step cell passes from the magic to the screen.

They are the files of nbdist on the call stacks at which the cell is parsed and sent, the user's
code runs, and a report is handed over, sent, stored and shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES = 30
"""Limit without preparation before the first step, start of the process, and health checks.

Preparation includes the plan and the data. Bookkeeping of the cluster is not counted either.
"""

KERNEL_HOPS = {
    "parse": {"MainThread"},
    "send": {"MainThread"},
    "hand over": {"nbdist-receiver"},
    "write": {"nbdist-receiver", "MainThread"},
    "show": {"MainThread"},
}
"""Events of the path in the notebook's process, with their threads.

nbdist parses the cell and sends it. The receiver hands each record over to the cell's monitor. Both
write the run to disk. The monitor shows progress on the screen.
"""

ENGINE_HOPS = {"user": {"MainThread"}, "hand over": {"MainThread"}, "send": {"nbdist-reporter"}}
"""Events of the path on an engine, with their threads.

The engine runs the user's code. The step hands its report over to the sender, a thread of its own.
"""

PROCESS_START = ("cluster/forkserver/", "worker/engine.py")
"""Files at the bottom of an engine's stacks. They start the process, and no cell passes them."""

NOTEBOOK = """
import json, sys
import sitecustomize
from IPython.core.interactiveshell import InteractiveShell

class Screen:
    def write(self, text): sitecustomize.screen(text)
    def flush(self): pass
    def isatty(self): return False

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nbdist")
shell.run_line_magic("dist_start", "2 --framework {framework}")
shell.run_cell_magic("dist_run", "", {setup!r})
for _ in range(2):
    shell.run_cell_magic("dist_run", {line!r}, {step!r})
shell.run_cell_magic("dist_run", "", "import sitecustomize; sitecustomize.start()")
sys.stdout = Screen()
sitecustomize.start()
shell.run_cell_magic("dist_run", {line!r}, {step!r})
kernel = sitecustomize.stop()
sys.stdout = sys.__stdout__
shell.run_cell_magic("dist_run", "", "found = sitecustomize.stop()")
shell.run_line_magic("dist_pull", "found")
shell.run_line_magic("dist_stop", "")
print("FOUND", json.dumps([kernel, *shell.user_ns["found"]]))
"""

DATA = """
import numpy as np
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = x.sum(1)
"""
CELLS = {
    "pjrt": (
        "jax",
        DATA
        + """
import jax, jax.numpy as jnp
data, params = (x, y), {"w": jnp.zeros((8,))}
def users_function(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)
""",
        """
x, y = batch
loss, grads = jax.value_and_grad(users_function)(params, x, y)
params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
loss
""",
    ),
    "mirrored": (
        "tensorflow",
        DATA
        + """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y))
w = tf.Variable(tf.zeros((8,)))
optimizer = tf.keras.optimizers.SGD(0.01)
optimizer.build([w])
def users_function(x, y):
    return tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)
""",
        """
x, y = batch
with tf.GradientTape() as tape:
    loss = users_function(x, y)
optimizer.apply_gradients([(tape.gradient(loss, w), w)])
loss
""",
    ),
}


def recorded(strategy: str) -> list[dict[str, list[str]]]:
    """Run a notebook with a step cell; return what the notebook and each engine recorded."""
    framework, setup, step = CELLS[strategy]
    line = "--data data --batch 64 --epochs 1"
    program = NOTEBOOK.format(framework=framework, setup=setup, line=line, step=step)
    paths = [str(ROOT / "tests" / "cell_path"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    line = done.stdout.rpartition("FOUND ")[2]
    assert done.returncode == 0, done.stderr
    return json.loads(line)  # type: ignore[no-any-return]


def files_passed(recorded: dict[str, list[str]], hops: dict[str, set[str]]) -> set[str]:
    """Return the files of nbdist on the stacks of the hops; each hop must have been recorded."""
    found = set()
    for event, threads in hops.items():
        lines = [line.split(": ") for line in recorded.get(event, ())]
        files = {file for thread, file in lines if thread in threads}
        assert files, f"no stack was recorded for {event!r}"
        found |= {file for file in files if not file.startswith(PROCESS_START)}
    return found


def path_of(strategy: str) -> tuple[set[str], set[str]]:
    """Return the files that a step cell passes in the notebook's process and on engines."""
    in_kernel, *on_engines = recorded(strategy)
    engine = set().union(*(files_passed(one, ENGINE_HOPS) for one in on_engines))
    return files_passed(in_kernel, KERNEL_HOPS), engine


@pytest.mark.parametrize("strategy", ["pjrt", pytest.param("mirrored", marks=pytest.mark.full)])
def test_a_step_cell_passes_30_files(strategy: str) -> None:
    kernel, engine = path_of(strategy)
    assert {
        "magics/dist.py",
        "session/cluster.py",
        "cells/parse.py",
        "execution/runner.py",
        "cluster/dispatcher.py",
        "telemetry/receiver.py",
        "telemetry/run_writer.py",
        "execution/monitor.py",
        "views/run/live_display.py",
        "views/run/cell_output.py",
    } <= kernel
    assert engine >= {
        "worker/cell_runner.py",
        "worker/training/loop.py",
        "worker/runtime/reporter.py",
    }
    assert len(kernel | engine) <= MOST_FILES, sorted(kernel) + sorted(engine)
