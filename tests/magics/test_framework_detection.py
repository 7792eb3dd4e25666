"""Detection of the framework that the notebook's cells use. Workers load only this one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nbdist.magics import framework_detection
from tests.kernels import Kernel

if TYPE_CHECKING:
    from pathlib import Path

MIXED = "import tensorflow as tf\nimport jax"


def notebook(folder: Path, *cells: str) -> Path:
    file = folder / "work.ipynb"
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    file.write_text(json.dumps({"cells": [*code, {"cell_type": "markdown", "source": MIXED}]}))
    return file


@pytest.mark.parametrize(
    ("cells", "framework"),
    [
        (["import jax.numpy as jnp"], "jax"),
        (["from flax import nnx"], "jax"),
        (["%%dist_run --strategy pjrt\nx = 1"], "jax"),
        (["import numpy", "with tf.device('cpu'): pass"], "tensorflow"),
        (["import keras"], "tensorflow"),
        (["%%dist_run --strategy mirrored\nx = 1"], "tensorflow"),
        (["import keras", "import jax"], None),
        (["import tensorflow", "%%dist_run --strategy pjrt\nx"], None),
        (["import numpy as np", "leaf = ajax(tfoo)"], None),
        ([], None),
    ],
)
def test_the_framework_is_detected_from_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: list[str], framework: str | None
) -> None:
    both = framework_detection.resources.FRAMEWORKS  # a double of an environment with both
    monkeypatch.setattr(framework_detection.resources, "choose_frameworks", lambda _: both)
    monkeypatch.setenv(framework_detection.NOTEBOOK_VARIABLE, str(notebook(tmp_path, *cells)))
    assert framework_detection.framework() == framework


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"cells": 3}', '{"cells": [{}]}', "\x00"])
def test_an_invalid_notebook_gives_no_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    file = tmp_path / "work.ipynb"
    file.write_text(content)
    for path in (str(file), str(tmp_path), str(tmp_path / "none"), ""):
        monkeypatch.setenv(framework_detection.NOTEBOOK_VARIABLE, path)
        assert framework_detection.framework() is None


@pytest.mark.processes
def test_a_cluster_loads_only_the_framework_of_its_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = notebook(tmp_path, "%dist_start 1 hosts", "%%dist_run\nimport jax")
    monkeypatch.setenv(framework_detection.NOTEBOOK_VARIABLE, str(path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with Kernel() as kernel:
        kernel.run("%load_ext nbdist").check()
        output = kernel.run("%dist_start 1 hosts").check().stdout
        assert "loading only jax, which this notebook uses" in output
        other = kernel.run("%%dist_run --strategy mirrored\n1")
        assert "%dist_start 1 hosts --framework both" in other.stderr + other.traceback
