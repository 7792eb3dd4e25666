"""Contents of the wheel: everything that is needed and nothing else."""

from __future__ import annotations

import json
import subprocess
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nbdist

if TYPE_CHECKING:
    import zipfile

ROOT = Path(__file__).parents[2]


def test_every_module_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "nbdist").rglob("*.py")}
    packed = set(wheel.namelist())
    assert sources <= packed
    assert not {name for name in packed if name.startswith(("tests", "benchmarks", "notebooks"))}


def test_the_metadata_is_correct(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == nbdist.__version__
    package = json.loads((ROOT / "labextension" / "package.json").read_text())
    assert package["version"] == nbdist.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert {"tensorflow", "jax", "all", "lab"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["Requires-Python"] in (">=3.11,<3.15", "<3.15,>=3.11")


def test_exact_versions_are_pinned_without_an_address() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all("==" in line and "/" not in line and "@" not in line for line in lines)
    assert {"tensorflow", "jax", "ipyparallel"} <= {line.split("==")[0] for line in lines}


@pytest.mark.processes
def test_replacements_of_unneeded_packages_exist() -> None:
    """A broken link breaks the next installation in the same folder."""
    package = json.loads((ROOT / "labextension" / "package.json").read_text())
    links = {w for w in package["resolutions"].values() if w.startswith("link:")}
    assert links
    for link in links:
        target = ROOT / "labextension" / link.removeprefix("link:")
        assert (target / "package.json").is_file(), link
        ignored = subprocess.run(["git", "check-ignore", str(target)], cwd=ROOT, check=False)
        assert ignored.returncode == 1, f"{target} is not in the repository"
