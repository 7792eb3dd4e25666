"""Imports of nbdist load no heavy packages."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.site.sitecustomize import HIDDEN

HEAVY = {
    *("tensorflow", "jax", "jaxlib", "keras", "numpy", "ipyparallel", "ipywidgets", "sklearn"),
    *("jupyter_server", "tornado", "anywidget", "google.protobuf"),
}


@cache
def loaded_after(code: str) -> frozenset[str]:
    program = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return frozenset(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.processes
def test_importing_the_package_loads_no_heavy_packages() -> None:
    assert not HEAVY & loaded_after("import nbdist")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["tensorflow", "jax", "keras", "anywidget", "jupyter_server"])
def test_the_notebook_side_loads_no_framework_and_no_widgets(name: str) -> None:
    assert name not in loaded_after("import nbdist.magics.extension, nbdist.session.cluster")


@pytest.mark.processes
@pytest.mark.full  # a helper of tests
def test_libraries_find_no_optional_packages_and_cells_do() -> None:
    """If this test fails with loaded packages, a library imports them later: shorten `HIDDEN`."""
    program = (
        "import os; os.environ['KERAS_BACKEND'] = 'jax'\n"
        f"import keras, jsonschema, sys; assert not set({HIDDEN}) & set(sys.modules)\n"
        f"import {', '.join(HIDDEN)}"
    )
    assert set(HIDDEN) <= loaded_after(program)


def test_every_public_name_is_available() -> None:
    import nbdist

    for name in nbdist.__all__:
        assert getattr(nbdist, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    import nbdist

    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = nbdist.nothing_of_the_kind  # type: ignore[attr-defined]
