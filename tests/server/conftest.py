"""One Jupyter server for all tests of this folder that need no server of their own."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.server.jupyter import JupyterServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    with JupyterServer(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture(scope="module")
def server(shared_server: JupyterServer) -> Iterator[JupyterServer]:
    """Provide the shared server without runs and clusters.

    The first test of a module must request it, else the server would be left behind.
    """
    yield shared_server
    for folder in (shared_server.runs, shared_server.clusters):
        shutil.rmtree(folder, ignore_errors=True)
