"""Notebooks in the manner of public tutorials: same results on workers as in one process.

Each file of `tests/notebooks_brought` is a notebook in percent format. Its second line names the
expressions to compare. Every cell runs unchanged.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import clusters, references

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

FOLDER = Path(__file__).parents[1] / "notebooks_brought"
NOTEBOOKS = {f"{path.parent.name}/{path.stem}": path for path in sorted(FOLDER.glob("*/*.py"))}
MODULES = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "optax", "flax.nnx")}
"""Modules that most notebooks of a framework import."""

QUICK = {
    "jax/optax_multisteps_ema",
    "jax/orbax_checkpoint",
    "jax/trainer_class",
    "tensorflow/dqn_replay",
    "tensorflow/gan_two_optimizers",
    "tensorflow/loop_top_level",
}
"""Notebooks of `make test`; `make test-full` runs all, in all sizes."""

FLAT = """
def _is_flat(tree):
    import numpy
    parts = [part for part in tree if not isinstance(part, (dict, list, tuple, str))]
    return tree and len(parts) == len(tree) and all(numpy.ndim(part) == 0 for part in parts)
def _flat(tree):
    import numpy
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree, key=str)]
    if isinstance(tree, (list, tuple)) and not _is_flat(tree):
        return [leaf for part in tree for leaf in _flat(part)]
    return [numpy.asarray(tree).tolist()]
outcome = _flat({text})
"""

WIDE = {"tensorflow/validation_early_stop": 1e-4, "jax/low_memory": 3e-2}
"""Relative tolerances of notebooks whose own rounding on one device is larger than 1e-5.

`low_memory` computes in bfloat16.
"""


class Notebook:
    """A notebook: its code cells, and the expression whose value is compared."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
        (compare,) = re.findall(r"^# compare: (.*)$", parts[0], re.MULTILINE)
        cells = zip(parts[1::2], parts[2::2], strict=True)
        self.cells = [cell for head, cell in cells if "[markdown]" not in head and cell.strip()]
        self.expression = f"[{', '.join(compare.split('; '))}]"

    @property
    def is_double(self) -> bool:
        """True if the notebook computes in float64."""
        return any(re.search(r"jax_enable_x64|set_floatx", cell) for cell in self.cells)

    @property
    def outcome(self) -> str:
        """Return the cell that assigns the compared values to `outcome`."""
        return FLAT.format(text=self.expression)

    @property
    def program(self) -> str:
        """Return the notebook as one program whose functions have sources."""
        cells = [*self.cells, self.outcome]
        return textwrap.dedent(f"""
            import linecache
            for number, cell in enumerate({cells!r}):
                name = f"<cell {{number}}>"
                linecache.cache[name] = len(cell), None, cell.splitlines(True), name
                exec(compile(cell, name, "exec"), globals())
        """)


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
        outcomes |= references.plainly(programs, *modules)
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
