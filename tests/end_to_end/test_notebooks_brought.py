"""Notebooks in the manner of public tutorials: same results on workers as in one process.

Every cell runs unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import clusters, references
from tests.brought import NOTEBOOKS, Notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

MODULES = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "optax", "flax.nnx")}
"""Modules that most notebooks of a framework import."""

QUICK = {
    "jax/optax_multisteps_ema",
    "jax/trainer_class",
    "tensorflow/gan_two_optimizers",
    "tensorflow/loop_top_level",
}
"""Notebooks of `make test`; `make test-full` runs all, in all sizes."""

WIDE = {"tensorflow/validation_early_stop": 1e-4, "jax/low_memory": 3e-2}
"""Relative tolerances of notebooks whose own rounding on one device is larger than 1e-5.

`low_memory` computes in bfloat16.
"""


SIZES = {"2": (2, 1), "4": (4, 1), "2x2": (2, 2)}
"""Hosts, and devices of each."""

CASES = [
    pytest.param(
        (framework, size),
        name,
        id=f"{name}-{size}",
        marks=() if name in QUICK and size == "2" else pytest.mark.full,
    )
    for framework in MODULES
    for size in SIZES
    for name in NOTEBOOKS
    if name.startswith(framework)
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    framework, size = request.param
    hosts, devices = SIZES[size]
    with clusters.cluster(hosts=hosts, framework=framework, devices_per_host=devices) as running:
        yield running


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen = {item.callspec.params["name"] for item in request.session.items if _is_case(item)}
    outcomes: dict[str, Any] = {}
    for framework, modules in MODULES.items():
        names = sorted(name for name in chosen if name.startswith(framework))
        programs = {name: Notebook(NOTEBOOKS[name]).program for name in names}
        outcomes |= references.plainly(programs, *modules) if programs else {}
    return outcomes


def _is_case(item: Any) -> bool:
    return item.path == Path(__file__) and "name" in getattr(item, "callspec", item).params


@pytest.mark.parametrize(("cluster", "name"), CASES, indirect=["cluster"])
def test_notebook_has_the_numbers_of_one_process(
    cluster: nbdist.Cluster, name: str, expected: dict[str, Any]
) -> None:
    cluster.restart()
    notebook = Notebook(NOTEBOOKS[name])
    for cell in (*notebook.cells, notebook.outcome):
        cluster.run(cell)
    tolerance = WIDE.get(name, 1e-9 if notebook.is_double else 1e-5)
    for values in cluster.pull(["outcome"]).values():
        assert len(values["outcome"]) == len(expected[name])
        for actual, one in zip(values["outcome"], expected[name], strict=True):
            scale = float(np.abs(np.asarray(one, float)).max(initial=1e-8))
            np.testing.assert_allclose(actual, one, rtol=tolerance, atol=tolerance * scale)
