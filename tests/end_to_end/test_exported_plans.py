"""Exported programs use the layouts of the notebook's cells."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from nbdist.records import Plan
from nbdist.worker.script.layouts import options_for
from tests import clusters, plans
from tests.end_to_end.test_exported_programs import (
    ARRAYS,
    FIT,
    JAX_MODEL,
    JAX_STATE,
    JAX_STEP,
    MIRRORED_MODEL,
    STEP,
    Training,
    in_float64,
    launch,
    run_cells,
    with_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

GATHER = "\nfrom jax.experimental.multihost_utils import process_allgather as gathered\n"
HEAD = (JAX_MODEL + GATHER, {})
STEP_CELLS = [HEAD, ("import numpy as np" + ARRAYS, {}), (JAX_STATE, {})]
STEP_WEIGHTS = "[gathered(w, tiled=True) for w in jax.tree.leaves(params)]"
FIT_CELLS = [("import keras\nimport numpy as np", {}), (ARRAYS, {}), (MIRRORED_MODEL, {})]


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


@pytest.mark.parametrize(
    "training",
    [
        Training(
            "pjrt",
            [*STEP_CELLS, (JAX_STEP, {**STEP, "fix": "tensor=2"})],
            'job_history["loss"]',
            STEP_WEIGHTS,
        ),
        pytest.param(
            Training(
                "pjrt",
                [*STEP_CELLS, (JAX_STEP, {**STEP, "fix": "tensor=2,micro=2", "budget": "1GB"})],
                'job_history["loss"]',
                STEP_WEIGHTS,
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(
            Training(
                "pjrt",
                [*FIT_CELLS, (FIT, {"fix": "tensor=2"})],
                'history.history["loss"]',
                "model.get_weights()",
            ),
            marks=pytest.mark.full,
        ),
    ],
    ids=["tensor", "micro", "fit"],
)
def test_program_has_the_layout_of_the_cell(
    cluster: nbdist.Cluster, tmp_path: Path, training: Training, request: pytest.FixtureRequest
) -> None:
    training = in_float64(training)
    run = run_cells(cluster, training)
    assert run.plan is not None
    assert any(any(tensor.spec) for tensor in run.plan.tensors if tensor.role == "parameter")
    cluster.run(f"weights = np.concatenate([np.ravel(w) for w in {training.weights}])")
    expected = cluster.pull(["weights"], ranks="0")[0]["weights"]
    cluster.export(str(tmp_path / "train"))
    with_results(tmp_path / "train", training)
    is_step = "data" in training.cells[-1][1]
    if is_step:
        stored = (tmp_path / "train" / "plan.json").read_bytes()
        assert msgspec.json.decode(stored, type=Plan).title == run.plan.title
    is_full = request.config.getoption("--full")
    for hosts in (2, 4) if is_full else (2,):
        ended = launch(tmp_path / "train", hosts=hosts)
        assert ended.returncode == 0, ended.stderr
        found = np.load(tmp_path / "train" / "result1.npz")
        assert found["weights"].dtype == np.float64
        if hosts == 2:
            assert "plans the layout again" not in ended.stdout
            np.testing.assert_array_equal(found["weights"], expected)
            if is_step:
                np.testing.assert_array_equal(found["loss"], np.ravel(run.history["loss"][-1]))
        else:
            text = f"nbdist: plan.json is for 2 devices ({run.plan.title}), and the program has 4"
            assert ended.stdout.count(text) == is_step
            np.testing.assert_allclose(found["weights"], expected, rtol=1e-9, atol=1e-12)
    if is_step and is_full:
        alone = launch(tmp_path / "train", hosts=1)
        assert alone.returncode == 1
        assert "PlanError: no layout over 1 devices fulfils the request" in alone.stderr


def test_layout_for_another_number_of_devices_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.made("both")
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    program = str(tmp_path / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", program, raising=False)
    given = {"data": "x", "batch": 8, "plan": "plan.json"}
    options, text = options_for(given, plan.devices)
    assert options.step is not None
    assert (options.step.planning.given, text) == (plan, "")
    options, text = options_for(given, 4)
    assert options.step is not None
    assert options.step.planning.given is None
    assert text.startswith(f"plan.json is for 8 devices ({plan.title}), and the program has 4: ")
