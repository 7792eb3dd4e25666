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
NOTEBOOKS = {path.stem: path for path in sorted((FOLDER / "tensorflow").glob("*.py"))}
QUICK = {
    "custom_train_step",
    "dqn_replay",
    "gan_two_optimizers",
    "gradient_accumulation",
    "loop_top_level",
    "trainer_class",
}
"""Notebooks of `make test`; `make test-full` runs all, also on 4 workers."""

FLAT = """
def _flat(tree):
    import numpy
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree, key=str)]
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in _flat(part)]
    return [numpy.asarray(tree).tolist()]
outcome = _flat({text})
"""

WIDE = {"validation_early_stop": 1e-4}
"""Relative tolerances of notebooks whose own rounding on one device is larger than 1e-5."""


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


CASES = [
    pytest.param(hosts, name, marks=() if name in QUICK and hosts == 2 else pytest.mark.full)
    for hosts in (2, 4)
    for name in NOTEBOOKS
]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=request.param, framework="tensorflow") as running:
        yield running


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen = {item.callspec.params["name"] for item in request.session.items if _is_case(item)}
    programs = {name: Notebook(NOTEBOOKS[name]).program for name in sorted(chosen)}
    return references.plainly(programs, "tensorflow", "keras")


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
    tolerance = WIDE.get(name, 1e-5)
    for values in cluster.pull(["outcome"]).values():
        assert len(values["outcome"]) == len(expected[name])
        for actual, one in zip(values["outcome"], expected[name], strict=True):
            scale = float(np.abs(np.asarray(one, float)).max(initial=1e-8))
            np.testing.assert_allclose(actual, one, rtol=tolerance, atol=tolerance * scale)
