"""Exported programs compare their ranks as the notebook does, with the same messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from tests import clusters
from tests.end_to_end.test_exported_programs import (
    ARRAYS,
    FIT,
    IMPORTS,
    JAX_LOOP,
    JAX_MODEL,
    JAX_STATE,
    MIRRORED_MODEL,
    MIRRORED_STEP,
    STEP,
    Training,
    launch,
    run_cells,
    with_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIRRORED_CELLS = [(IMPORTS, {}), (ARRAYS, {}), (MIRRORED_MODEL, {})]
JAX_CELLS = [(JAX_MODEL, {}), ("import numpy as np" + ARRAYS, {}), (JAX_STATE, {})]
OWN_CHANGE = 'params = {**params, "b": params["b"] + rank}\n'
LINE = re.compile(r" \(line (\d+)\)")
OWN_VARIABLES = "\nmodel.layers[0].bias.assign_add([float(rank)] * 8)\n"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


@pytest.mark.parametrize(
    ("cluster", "cells"),
    [
        ("jax", [*JAX_CELLS, (JAX_LOOP + OWN_CHANGE, {})]),
        pytest.param(
            "tensorflow", [*MIRRORED_CELLS, (FIT + OWN_VARIABLES, {})], marks=pytest.mark.full
        ),
        pytest.param(
            "tensorflow",
            [*MIRRORED_CELLS, (OWN_VARIABLES, {"guard": 0}), (MIRRORED_STEP, STEP)],
            marks=pytest.mark.full,
        ),
    ],
    indirect=["cluster"],
    ids=["loop", "fit", "step"],
)
def test_rank_that_changes_its_copy_ends_the_program(
    cluster: nbdist.Cluster, tmp_path: Path, cells: list[tuple[str, dict[str, Any]]]
) -> None:
    """Compare the errors. An unfinished cell cannot be exported, so it runs without a guard too."""
    strategy = "pjrt" if "jax" in cells[0][0] else "mirrored"
    with pytest.raises(nbdist.CellError) as caught:
        run_cells(cluster, Training(strategy, cells, "", ""))
    assert (caught.value.rank, caught.value.ename) == (1, "StepError")
    source, options = cells[-1]
    unguarded = [*cells[:-1], (source, {**options, "guard": 0})]
    run_cells(cluster, Training(strategy, unguarded, "", ""))
    cluster.export(str(tmp_path / "train"))
    program = tmp_path / "train" / "train.py"
    before, _, after = program.read_text().rpartition("guard=0")
    program.write_text(f"{before}guard=200{after}")
    ended = launch(tmp_path / "train")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "rank_checks.py" not in ended.stderr, "frames of nbdist are left out"
    assert "nbdist: rank 0 ends: another rank failed" in ended.stderr
    assert LINE.sub("", caught.value.evalue) in LINE.sub("", ended.stderr)
    lines = [int(line) for line in LINE.findall(ended.stderr)]
    assert bool(lines) == bool(LINE.search(caught.value.evalue)) == (strategy == "pjrt")
    for line in lines:
        assert "params" in program.read_text().splitlines()[line - 1]


DRAW = """
if rank == 1:
    np.random.rand(3)
"""


@pytest.mark.full  # rare
@pytest.mark.parametrize("cluster", ["jax"], indirect=True)
def test_generators_continue_from_rank_0(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    cells = [*JAX_CELLS[:1], ("import numpy as np" + ARRAYS + DRAW, {})]
    state = JAX_STATE + 'params["b"] = jnp.asarray(np.random.rand(8))'
    training = Training(
        "pjrt", [*cells, (state, {}), (JAX_LOOP, {})], "losses", "jax.tree.leaves(params)"
    )
    run_cells(cluster, training)
    cluster.run("weights = [np.asarray(w).ravel() for w in jax.tree.leaves(params)]")
    expected = np.concatenate(cluster.pull(["weights"], ranks="0")[0]["weights"])
    cluster.export(str(tmp_path / "train"))
    with_results(tmp_path / "train", training)
    ended = launch(tmp_path / "train")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("nbdist: rank 1 drew other random numbers than rank 0 (NumPy)") == 1
    for rank in range(2):
        found = np.load(tmp_path / "train" / f"result{rank}.npz")["weights"]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["tensorflow"], indirect=True)
def test_program_has_the_precision_and_the_guard_of_the_cell(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    step = MIRRORED_STEP.replace("model(x, training=True)", "tf.cast(model(x), tf.float32)")
    training = Training(
        "mirrored",
        [*MIRRORED_CELLS, (step, {**STEP, "precision": "float16", "guard": 3})],
        'job_history["loss"]',
        "model.get_weights()",
    )
    run = run_cells(cluster, training)
    cluster.run("weights = np.concatenate([w.ravel() for w in model.get_weights()])")
    expected = cluster.pull(["weights"], ranks="0")[0]["weights"]
    cluster.export(str(tmp_path / "train"))
    with_results(tmp_path / "train", training)
    ended = launch(tmp_path / "train")
    assert ended.returncode == 0, ended.stderr
    found = np.load(tmp_path / "train" / "result0.npz")
    np.testing.assert_array_equal(found["loss"], run.history["loss"][0])
    np.testing.assert_array_equal(found["weights"], expected)
