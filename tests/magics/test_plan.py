"""`%%dist_plan` in a notebook, and plans that were edited by hand."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

SET_UP = """%%dist_run
import jax, jax.numpy as jnp, numpy as np
key = jax.random.key(0)
params = {"up": jax.random.normal(key, (32, 64)) * 0.1, "down": jnp.zeros((64, 8))}
outline = jax.eval_shape(lambda: {"up": jnp.zeros((8192, 65536)), "down": jnp.zeros((65536, 8))})
train = np.ones((64, 32), np.float32), np.ones((64, 8), np.float32)
wide = np.ones((64, 8192), np.float32), np.ones((64, 8), np.float32)
"""
STEP = """
x, y = batch
def error(weights):
    return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - y) ** 2)
loss, slopes = jax.value_and_grad(error)(params)
params = jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)
"""
OUTLINED = STEP.replace("params", "outline")


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    """Start a kernel with one worker that has four devices."""
    with Kernel() as running:
        running.run("%load_ext nbdist\n%dist_start 1 --framework jax --devices-per-host 4").check()
        running.run(SET_UP).check()
        yield running


def value(notebook: Kernel, expression: str) -> str:
    done = notebook.run(expression).check()
    return done.plain[-1]


def test_a_plan_is_shown_without_running_the_step(notebook: Kernel) -> None:
    shown = notebook.run(f"%%dist_plan --data train --batch 16 -o mine{STEP}").check()
    assert "data 4 on 4 x CPU" in shown.plain[-1]
    assert "['up']" in shown.plain[-1]
    assert value(notebook, "mine.rows, mine.devices") == "(16, 4)"
    options = "--epochs 3 --checkpoint kept --save-every 5 --seed 1 --guard 0"
    again = notebook.run(f"%%dist_plan --data train --batch 16 {options}{STEP}").check()
    assert "data 4 on 4 x CPU" in again.plain[-1]
    notebook.run("%dist_pull params").check()
    assert value(notebook, "float(abs(params['down']).max())") == "0.0"


def test_missing_arrays_and_hardware_can_be_planned(notebook: Kernel) -> None:
    """Plan arrays without data for hardware that this machine does not have."""
    cell = f"%%dist_plan --data wide --batch 64 --on 16xH100 --budget 3GiB -o large{OUTLINED}"
    shown = notebook.run(cell).check()
    assert "on 16 x H100" in shown.plain[-1]
    assert value(notebook, "large.memory.total <= 3 * 2**30 == large.memory.available") == "True"
    refused = notebook.run(f"%%dist_run --strategy pjrt --data wide --batch 64{OUTLINED}")
    assert "it can only be planned, with %%dist_plan" in refused.traceback


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--on 8xH900", "unknown hardware 'H900': known are H"),
        ("--fix tensor=3", "no layout over 4 devices fulfils the request \\(model=3\\)"),
        ("--budget 1kB", "the step does not fit: .* bytes\\) more than the .* available"),
        ("--fix pipe=2", "unknown name 'pipe': use data"),
        ('--on "2 hosts x 4 V100, fast"', "'fast' is not a network bandwidth"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_reason(
    notebook: Kernel, options: str, message: str
) -> None:
    refused = notebook.run(f"%%dist_plan --data train --batch 16 {options}{STEP}")
    assert refused.status == "error"
    assert re.search(message, refused.traceback), refused.traceback


def test_an_edited_plan_is_used(notebook: Kernel, tmp_path: Path) -> None:
    """Swap row and column sharding by hand.

    All errors of another edited plan are reported at once.
    """
    notebook.run(SET_UP).check()
    notebook.run(
        f"%%dist_run --strategy pjrt --data train --batch 16 --fix tensor=2 -o run{STEP}"
    ).check()
    path = tmp_path / "plan.json"
    notebook.run(f"import msgspec\nopen('{path}', 'wb').write(msgspec.json.encode(run.plan))")
    plan = json.loads(path.read_text())
    specs = {tensor["path"]: tensor for tensor in plan["tensors"]}
    assert specs["params['up']"]["spec"] == [[], ["model"]]
    specs["params['up']"]["spec"] = [["model"], []]
    specs["params['down']"]["spec"] = [["data"], []]
    path.write_text(json.dumps(plan))
    cell = f"%%dist_run --strategy pjrt --data train --batch 16 --plan {path} -o edited{STEP}"
    notebook.run(SET_UP).check()
    notebook.run(cell).check()
    spec = "{t.path: t.spec for t in edited.plan.tensors}['params[\\'up\\']']"
    assert value(notebook, spec) == "(('model',), ())"
    assert value(notebook, "edited.plan.memory.arguments == edited.compiled.arguments") == "True"
    assert value(notebook, "bool(abs(edited.loss - run.loss).max() < 1e-5)") == "True"
    specs["params['up']"]["spec"] = [["model", "model"], ["pipe"]]
    specs["params['down']"]["path"] = "params['gone']"
    path.write_text(json.dumps(plan))
    refused = notebook.run(cell)
    assert "the step has no params['gone']" in refused.traceback
    assert "params['up'] is sharded over pipe: the axes are data, model" in refused.traceback


FIT = """
import keras
model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(8)])
model.compile("adam", "mse")
try:
    model.fit(*train, batch_size=16, verbose=0)
except Exception:
    pass
reached = True
"""


def test_a_fit_is_planned_without_training(notebook: Kernel) -> None:
    """The end of the fit passes the user's `except`. The code after the fit does not run."""
    shown = notebook.run(f"%%dist_plan -o fitted{FIT}").check()
    assert "data 4 on 4 x CPU" in shown.plain[-1]
    assert "model.sequential" in shown.plain[-1]
    assert value(notebook, "fitted.rows, len(fitted.tensors)") == "(16, 18)"
    done = notebook.run("%%dist_run\nint(model.optimizer.iterations), 'reached' in globals()")
    assert "(0, False)" in done.check().stdout


def test_verify_compiles_the_plan(notebook: Kernel) -> None:
    cell = f"%%dist_plan --data train --batch 16 --verify --fix tensor=2 -o asked{STEP}"
    shown = notebook.run(cell).check()
    assert "compiled by XLA for this hardware in" in shown.plain[-1]
    assert value(notebook, "asked.verified.arguments - asked.memory.arguments") == "0"


@pytest.mark.full  # worker/planning/test_compiler_check.py compiles for other hardware
def test_verify_compiles_for_other_hardware(notebook: Kernel) -> None:
    """The step is traced for the number of planned devices, and not of available ones."""
    notebook.run(f"%%dist_plan --on 8xCPU --verify --fix tensor=2,data=4 -o other{FIT}").check()
    assert value(notebook, "other.verified.arguments == other.memory.arguments") == "True"


@pytest.mark.parametrize(
    ("line", "cell", "message"),
    [
        ("--batch 16", FIT, "--batch without --data"),
        ("", "1", "nothing to plan: the cell trains no Keras model on JAX with `fit`"),
        ("--on 8xH1", FIT, "H100"),
        ("--fix tensor=3", FIT, "no layout over 4 devices fulfils the request"),
    ],
)
def test_invalid_requests_for_a_plan_are_refused(
    notebook: Kernel, line: str, cell: str, message: str
) -> None:
    assert message in notebook.run(f"%%dist_plan {line}\n{cell}").traceback


def test_a_model_is_planned_by_its_name(notebook: Kernel) -> None:
    notebook.run(f"%%dist_plan -o by_cell{FIT}").check()
    line = "%dist_plan model --data train --batch 16 -o by_name"
    shown = notebook.run(line).check()
    assert "data 4 on 4 x CPU" in shown.plain[-1]
    assert value(notebook, "by_name.tensors == by_cell.tensors") == "True"
    other = notebook.run("%dist_plan model --data train --batch 16 --on 8xH100").check()
    assert "on 8 x H100" in other.plain[-1]
    done = notebook.run("%%dist_run\nint(model.optimizer.iterations)")
    assert "0" in done.check().stdout


def test_names_are_shown_in_the_newest_plan(notebook: Kernel) -> None:
    notebook.run(f"%%dist_plan --data train --batch 16 --fix tensor=2{STEP}").check()
    shown = notebook.run("%dist_plan params -o own").check().plain[-1]
    assert re.match(r"params in data 2 x tensor 2 on 4 x CPU: .* of the .* on each device", shown)
    assert "P(None, 'model')" in shown
    assert "batch" not in shown
    assert value(notebook, "{t.path.partition('[')[0] for t in own.tensors}") == "{'params'}"
    notebook.run(SET_UP).check()
    notebook.run(f"%%dist_run --strategy pjrt --data train --batch 16{STEP}").check()
    assert "params in data 4 on" in notebook.run("%dist_plan params").check().plain[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%dist_plan", "write a step below %%dist_plan --data NAME"),
        ("%dist_plan gone", "the plan contains no gone: it contains params, batch"),
        ("%dist_plan a b --data train", "add the name of one Keras model"),
        ("%dist_plan params --data train", "'dict' object has no attribute 'fit'"),
        (f"%%dist_plan params --data train --batch 16{STEP}", "params: remove the names"),
    ],
)
def test_names_without_a_plan_are_refused(notebook: Kernel, line: str, message: str) -> None:
    notebook.run(f"%%dist_plan --data train --batch 16{STEP}").check()
    assert message in notebook.run(line).traceback
