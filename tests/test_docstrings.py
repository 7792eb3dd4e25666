"""Docstrings of public names contain the sections of the API reference, and their examples run."""

from __future__ import annotations

import inspect
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
import nbdist.session.submission
from tests.runs import losses, new_run

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
SECTIONS = {
    "Batch": ("Attributes",),
    "Cluster": ("Args", "Attributes", "Raises", "Examples"),
    "Cluster.adopt": ("Args", "Returns", "Raises"),
    "Cluster.devices": ("Args", "Returns", "Raises"),
    "Cluster.examine": ("Args", "Returns", "Raises"),
    "Cluster.export": ("Args", "Returns", "Raises"),
    "Cluster.submit": ("Args", "Returns", "Raises"),
    "job": ("Args", "Returns", "Raises"),
    "Cluster.follow": ("Returns", "Raises"),
    "Cluster.hosts": ("Returns", "Raises"),
    "Cluster.leave": (),
    "Cluster.logs": ("Args", "Returns", "Raises"),
    "Cluster.pull": ("Args", "Returns", "Raises"),
    "Cluster.push": ("Args", "Returns", "Raises"),
    "Cluster.resize": ("Args", "Returns", "Raises"),
    "Cluster.restart": ("Raises",),
    "Cluster.run": ("Args", "Returns", "Raises"),
    "Cluster.show": ("Args", "Returns", "Raises"),
    "Cluster.status": ("Returns",),
    "Cluster.stop": (),
    "Cluster.trace": ("Args", "Returns", "Raises"),
    "Cluster.workers": ("Args", "Returns"),
    "Host": ("Attributes",),
    "PjRTStrategy": ("Args", "Attributes", "Raises", "Examples"),
    "Run": ("Attributes",),
    "session.submission.SubmittedJob.cancel": ("Raises",),
    "session.submission.SubmittedJob.follow": ("Raises",),
    "session.submission.SubmittedJob.resume": ("Raises",),
    "session.submission.SubmittedJob.wait": ("Args", "Returns", "Raises"),
    "Sync": ("Attributes",),
    "attach": ("Args", "Returns", "Raises"),
    "autoplace": ("Args", "Returns", "Raises", "Examples"),
    "devices": ("Args", "Returns", "Examples"),
    "meshes": ("Args", "Returns", "Raises", "Examples"),
    "on_alert": ("Args", "Returns", "Raises", "Examples"),
    "pipelined": ("Args", "Returns", "Raises", "Examples"),
    "place": ("Args", "Returns", "Raises", "Examples"),
    "runs": ("Returns", "Examples"),
    "script": ("Args", "Returns", "Raises"),
    "stages": ("Args", "Returns", "Raises", "Examples"),
    "where": ("Args", "Returns", "Raises", "Examples"),
}
NEEDS_WORKERS = {"Cluster"}
WITH_EXAMPLES = sorted(
    name
    for name, sections in SECTIONS.items()
    if "Examples" in sections and name not in NEEDS_WORKERS
)
PROGRAM = """
import doctest, json, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
import nbdist
names = {"__name__": "__main__", "jax": jax, "jnp": jnp, "np": np, "nbdist": nbdist}
runner = doctest.DocTestRunner(
    optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
)
found = {}
for name in sys.argv[1:]:
    text, output = getattr(nbdist, name).__doc__, []
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, name, 0)
    outcome = runner.run(test, out=output.append)
    found[name] = outcome.attempted, outcome.failed, "".join(output)
exec(sys.stdin.read(), names | {"params": {"w": jnp.ones((8, 4))}})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Run all examples, and those of the page, in a process with eight devices and two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for steps, began in ((5, 1767225600.0), (3, 1767229200.0)):
        run = new_run(folder, status="finished", began=began, ended=began + 1)
        for rank in (0, 1):
            run.take(losses(1, steps, rank))
        run.close()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *WITH_EXAMPLES],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "NBDIST_RUNS_FOLDER": str(folder),
            "NBDIST_PLACEMENTS": str(folder / "placements.sqlite"),
        },
        input="\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.processes
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, outcomes: Mapping[str, Any]) -> None:
    attempted, failed, output = outcomes[name]
    assert attempted
    assert not failed, output


@pytest.mark.parametrize("name", SECTIONS)
def test_a_docstring_has_its_sections(name: str) -> None:
    public = operator.attrgetter(name)(nbdist)
    text = inspect.getdoc(public) or ""
    lines = text.splitlines()
    assert lines[0].endswith(".")
    assert [f"{section}:" for section in SECTIONS[name] if f"{section}:" not in lines] == []
    missing = [
        argument
        for argument in arguments(public)
        if not re.search(rf"^    \*{{0,2}}{argument}: ", text, re.MULTILINE)
    ]
    assert missing == []


def arguments(public: Any) -> list[str]:
    """Return the names of all parameters."""
    return [name for name in inspect.signature(public).parameters if name != "self"]


def test_each_public_method_of_a_cluster_has_a_row() -> None:
    methods = {
        f"Cluster.{name}"
        for name, _ in inspect.getmembers(nbdist.Cluster, inspect.isroutine)
        if not name.startswith("_")
    }
    assert methods == {name for name in SECTIONS if name.startswith("Cluster.")}


def test_the_api_page_lists_each_public_name() -> None:
    rows = re.findall(r"^\| `nbdist\.(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(nbdist.__all__)
    assert len(nbdist.__all__) <= 30


def test_public_names_are_listed_before_their_import() -> None:
    assert set(nbdist.__all__) <= set(dir(nbdist))
