"""Notebooks run headless, as `make demo` runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from nbdist.records import RUN_MIME
from nbdist.server.documents import EXAMPLES
from notebooks.run import execute
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent


SNIPPETS = ROOT / "labextension" / "schema" / "panel.json"


def executed(name: str, folder: Path, source: Path = ROOT / "notebooks") -> list[str]:
    """Run a notebook and return the text of every output. Unexpected errors fail."""
    execute(source / name, folder / name)
    cells = nbformat.read(folder / name, as_version=4).cells
    return [
        output.get("text")
        or output.get("data", {}).get("text/plain", "")
        or output.get("evalue", "")
        for cell in cells
        for output in cell.get("outputs", ())
    ]


@pytest.mark.processes
@pytest.mark.parametrize("framework", [pytest.param("tensorflow", marks=pytest.mark.full), "jax"])
def test_an_example_of_the_launcher_learns(tmp_path: Path, framework: str) -> None:
    outputs = executed(f"{framework}.ipynb", tmp_path, EXAMPLES)
    (table,) = [text for text in outputs if text.startswith("loss by rank")]
    rows = [list(map(float, line.split()[1:])) for line in table.splitlines()[3:]]
    assert len(rows) == 2
    assert all(row[-1] < 0.7 * row[0] for row in rows), table


@pytest.mark.processes
def test_every_snippet_of_the_panel_runs_as_inserted() -> None:
    settings = json.loads(SNIPPETS.read_text("utf-8"))
    snippets = settings["properties"]["snippets"]["default"]
    with Kernel() as kernel:
        for snippet in snippets:
            kernel.run(snippet["code"].replace("{hosts}", "2")).check()
        assert kernel.run("print(run.last('loss') < 8)").check().stdout == "True\n"


def pictures_of_runs(notebook: Path) -> Iterator[set[str]]:
    """Yield the MIME types of each output of a run."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", ()):
            if RUN_MIME in output.get("data", {}):
                yield set(output.data)


@pytest.mark.processes
def test_the_tour_trains_on_both_frameworks(tmp_path: Path) -> None:
    outputs = executed("00_tour.ipynb", tmp_path)
    tables = [text for text in outputs if text.startswith("loss by rank")]
    assert len(tables) == 2
    for table in tables:
        rows = [line.split() for line in table.splitlines()[3:]]
        assert [row[0] for row in rows] == ["0", "1", "2", "3"]
        losses = [[float(value) for value in row[1:]] for row in rows]
        assert all(len(row) == 4 and row[-1] < 0.5 * row[0] for row in losses)
    assert any("on one replica and on 4: the same" in text for text in outputs)
    accuracies = re.search(r"accuracy: ([\d.]+) under TensorFlow, ([\d.]+) under JAX", str(outputs))
    assert accuracies is not None
    assert all(float(accuracy) > 0.93 for accuracy in accuracies.groups())
    table = next(text for text in outputs if re.match(r"\d+ runs\n", text))
    assert len(re.findall(r"  Cell \d+, step, ", table)) >= 2
    assert "4 workers are ready" in (tmp_path / "00_tour.html").read_text()
    pictures = list(pictures_of_runs(tmp_path / "00_tour.ipynb"))
    assert pictures == [{RUN_MIME, "text/html", "text/plain"}] * 4, (
        "a picture is stored also without a front end"
    )


@pytest.mark.full
def test_the_mirrored_notebook(tmp_path: Path) -> None:
    """Test a checked network, a named mistake, half precision and sequences."""
    text = "\n".join(executed("01_mirrored.ipynb", tmp_path))
    assert "one step of 64 samples on one replica and on 2: the same" in text
    assert "Values are 2 times too small, the number of replicas" in text
    assert "growing to 0.04 over 3 steps" in text
    accuracy = re.search(r"were not trained on: ([\d.]+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    losses = re.findall(r"<nbdist run \d+: .*loss ([\d.]+)", text)
    by_name = [x for x in set(losses) if losses.count(x) == 2]  # below its cell, and shown again
    assert len(by_name) == 2
    assert max(map(float, by_name)) < 0.2


@pytest.mark.full  # `test_step_jax.py` and `worker/jax/keras/test_fit.py` test the same
def test_the_pjrt_notebook(tmp_path: Path) -> None:
    """Test Keras, Flax and bare pytrees over one mesh."""
    text = "\n".join(executed("02_pjrt.ipynb", tmp_path))
    assert "one step of 60 samples on one replica and on 2: the same" in text
    found = re.search(r"digits: ([\d.]+); predictions: \(297, 10\)", text)
    both = re.search(r"test digits: ([\d.]+) with Flax, ([\d.]+) by hand", text)
    assert found is not None
    assert both is not None
    assert all(float(accuracy) > 0.9 for accuracy in (found[1], *both.groups()))


def test_saved_notebooks_hold_no_outputs() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells), f"{path.name} has outputs"


@pytest.mark.full  # `test_recovery.py` tests the same
def test_the_recovery_notebook(tmp_path: Path) -> None:
    """Test that a run continues bit for bit after a worker dies, and resumes later."""
    outputs = executed("03_recovery.ipynb", tmp_path)
    text = "\n".join(outputs)
    assert re.search(r"recovered: rank 2@\S+ died after step \d+, resumed after step \d+", text)
    digests = re.findall(r"\[0-2@\S+\] Out: '(\w{16})'", text)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert "True" in outputs
    assert "resumed from the checkpoint of step 228" in text


@pytest.mark.full  # `test_plan.py` and `test_planned.py` test the same
def test_the_plan_notebook(tmp_path: Path) -> None:
    """Test a plan for 175 billion parameters, a sharded table and exact byte predictions."""
    text = "\n".join(executed("04_plan.ipynb", tmp_path))
    assert "175 billion parameters" in text
    assert re.search(r"on 1,?024 x A100", text)
    predicted = re.findall(r": ([\d,]+) bytes on each device, and XLA reports ([\d,]+)", text)
    assert len(predicted) == 2
    assert all(ours == theirs for ours, theirs in predicted)
    difference = re.search(r"largest difference of the losses: (\S+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    assert text.count("layout data 4 x tensor 2, ZeRO-3") == 2  # the step, and the fit


@pytest.mark.full  # `placing` and `test_trace.py` test the same
def test_the_placement_notebook(tmp_path: Path) -> None:
    """Test measured devices, placed data and the time of each line of a cell."""
    text = "\n".join(executed("05_placement.ipynb", tmp_path))
    assert "nbdist: 8 devices on 1 host" in text
    assert "float32[4096, 256]  4.0 MiB  whole  cpu:3" in text
    assert "P('data', 'model'): parts of [1024, 256]" in text
    assert "as the batch: True\nwhole on each: False" in text
    assert "gradients are the same: True" in text
    fallen = re.search(r"loss ([\d.]+) -> ([\d.]+); stages are idle for 20% of the time", text)
    assert fallen is not None
    assert float(fallen[2]) < 0.5 * float(fallen[1])
    assert "scores: 1 kind of inputs" in text
    assert "make it 8 or 12, or use another of" in text
    assert re.search(r"4  c = jax.jit\(jnp.matmul\)\(a, b\) +\d", text)
    assert "data (2): between processes of one host" in text
    assert "data:image/png;base64," in (tmp_path / "05_placement.html").read_text()


@pytest.mark.full  # `worker/export/` and `test_exported_programs.py` test the same
def test_the_export_notebook(tmp_path: Path) -> None:
    """Test that a program has the weights of the notebook, and that plain Keras loads the model."""
    text = "\n".join(executed("06_export.ipynb", tmp_path))
    assert re.search(r"digits    0 1 2 3 4 5 6 7 8 9\r?\npredicted( \d){10}\r?\n", text)
    assert text.count("\nTrue\n") == 1  # the losses
    assert text.count(": True") == 4
    assert ": False" not in text
