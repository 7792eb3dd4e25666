"""Exported programs use the layouts of the notebook's cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from nbdist.records import Plan
from tests import clusters
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
    for hosts in (2, 4):
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
    if is_step and request.config.getoption("--full"):
        alone = launch(tmp_path / "train", hosts=1)
        assert alone.returncode == 1
        assert "PlanError: no layout over 1 devices fulfils the request" in alone.stderr
