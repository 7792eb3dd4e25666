"""Version of the JupyterLab extension beside the Python package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import nbdist
from tests.server.jupyter import JupyterServer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes


def log_with_labextension(folder: Path, version: str) -> str:
    """Start a server with a JupyterLab extension of this version first in its path.

    Return its log.
    """
    package = folder / "first" / "labextensions" / "nbdist" / "package.json"
    package.parent.mkdir(parents=True)
    package.write_text(json.dumps({"name": "nbdist", "version": version}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "first"))
        with JupyterServer(folder) as server:
            return server.log.read_text()


def test_an_older_labextension_is_reported_with_the_remedy(tmp_path: Path) -> None:
    log = log_with_labextension(tmp_path, "0.0.1")
    assert f"the JupyterLab extension in {tmp_path}/first/labextensions/nbdist" in log
    assert f"has version 0.0.1, but the Python package has version {nbdist.__version__}." in log
    assert "Remove that folder" in log


@pytest.mark.full  # the inverse
def test_a_labextension_of_the_same_version_is_not_reported(tmp_path: Path) -> None:
    log = log_with_labextension(tmp_path, nbdist.__version__)
    assert "nbdist" in log
    assert "but the Python package has version" not in log
