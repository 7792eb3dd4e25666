"""The notebooks run headless, as `make demo` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from notebooks.run import execute

ROOT = Path(__file__).parent.parent


def test_the_tour_trains_on_both_frameworks(tmp_path: Path) -> None:
    page = execute(ROOT / "notebooks" / "00_tour.ipynb", tmp_path / "00_tour.ipynb")
    outputs = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in nbformat.read(tmp_path / "00_tour.ipynb", as_version=4).cells
        for output in cell.get("outputs", ())
    ]
    tables = [text for text in outputs if text.startswith("loss by rank")]
    assert len(tables) == 3
    for table in tables:
        rows = [line.split() for line in table.splitlines()[3:]]
        assert [row[0] for row in rows] == ["0", "1", "2", "3"]
        losses = [[float(value) for value in row[1:]] for row in rows]
        assert all(len(row) in (4, 6) and row[-1] < 0.5 * row[0] for row in losses)
    accuracies = re.search(r"accuracy: ([\d.]+) under TensorFlow, ([\d.]+) under JAX", str(outputs))
    assert accuracies is not None
    assert all(float(accuracy) > 0.93 for accuracy in accuracies.groups())
    assert "4 workers are ready" in page.read_text()


def test_saved_notebooks_hold_no_outputs() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells), f"{path.name} has outputs"
