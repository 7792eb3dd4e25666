"""Exported programs with two trainings: each of them is saved, and continues after SIGTERM."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.jobs import folder
from tests import clusters
from tests.end_to_end.test_exported_programs import (
    LIMIT_S,
    SINGLE_TRAININGS,
    TRAININGS,
    command,
    export,
    launch,
    run_cells,
    with_results,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

EPOCHS = 150


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework=request.param) as running:
        yield running


def stopped(target: Path, *words: str) -> str:
    """Stop a program by SIGTERM in its third epoch, and return its output until then."""
    running = subprocess.Popen(
        command(*words), cwd=target, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    lines = []
    while not lines or not lines[-1].startswith("[0] epoch 3 "):
        lines.append(running.stdout.readline())
        assert lines[-1], f"the program ended: {''.join(lines)}\n{running.communicate()[1]}"
    running.terminate()
    _, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 75, err
    return "".join(lines)


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("jax", "pjrt step"),
        pytest.param("tensorflow", "mirrored fit", marks=pytest.mark.full),
        pytest.param("jax", "pjrt loop", marks=pytest.mark.full),
        pytest.param("jax", "pjrt fit", marks=pytest.mark.full),
        pytest.param("tensorflow", "mirrored step", marks=pytest.mark.full),
    ],
    indirect=["cluster"],
)
def test_both_trainings_continue_after_a_stop(
    cluster: nbdist.Cluster, tmp_path: Path, name: str
) -> None:
    training = {**TRAININGS, **SINGLE_TRAININGS}[name]
    *before, (source, options) = training.cells
    second = (f"{source}\n# again", options)
    both = replace(training, cells=[*before, (source, options), second])
    run_cells(cluster, both)
    target = tmp_path / "train"
    export(cluster, target, cell=len(both.cells))
    with_results(target, both)
    path = target / folder.PROGRAM
    text = path.read_text()
    for few in ("epochs=2", "range(2)", "epochs=args.epochs"):
        text = text.replace(few, few.replace("2", str(EPOCHS)).replace("args.epochs", str(EPOCHS)))
    path.write_text(text)
    ended = launch(target)
    assert ended.returncode == 0, ended.stderr
    expected = [dict(np.load(target / f"result{rank}.npz")) for rank in range(2)]
    words = ("--checkpoint", str(tmp_path / "saved"))
    assert stopped(target, *words).count("[0] epoch 1 ") == 1
    (earlier,) = (tmp_path / "saved").iterdir()
    assert earlier.name == f"cell-{len(before) + 1}"
    stopped_again = stopped(target, *words)
    assert stopped_again.count("[0] epoch 1 ") == 1, "it continued the first training"
    ended = launch(target, *words)
    assert ended.returncode == 0, ended.stderr
    assert "[0] epoch 1 " not in ended.stdout
    for rank, values in enumerate(expected):
        found = np.load(target / f"result{rank}.npz")
        np.testing.assert_array_equal(found["weights"], values["weights"])
