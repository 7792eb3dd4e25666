"""Placement page of a cluster, requested from a real Jupyter server as by a browser."""

from __future__ import annotations

import secrets
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from nbdist.server.handlers import PLACEMENT_BYTES
from tests.server.jupyter import BASE, TOKEN, JupyterServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

PAGE = "<details open><summary>params</summary>größer</details>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    with JupyterServer(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture
def folder(server: JupyterServer) -> Path:
    """Create the folder of a cluster."""
    folder = server.clusters / secrets.token_hex(6)
    folder.mkdir(parents=True)
    return folder


def status(server: JupyterServer, cluster: str, token: str = TOKEN) -> int:
    return server.get(f"nbdist/clusters/{cluster}/placement", token=token)[0]


def test_the_page_is_html_that_runs_no_scripts(server: JupyterServer, folder: Path) -> None:
    (folder / "placement.html").write_text(PAGE, "utf-8")
    address = f"http://{server.at}/{BASE}/nbdist/clusters/{folder.name}/placement?token={TOKEN}"
    with urllib.request.urlopen(address) as answer:
        assert answer.read().decode() == PAGE
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        policy = answer.headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "style-src 'unsafe-inline'", "sandbox"} <= set(policy)
    assert not [part for part in policy if part.startswith(("script-src", "sandbox "))]


def test_requests_without_the_token_are_refused(server: JupyterServer, folder: Path) -> None:
    (folder / "placement.html").write_text(PAGE, "utf-8")
    assert status(server, folder.name, token="wrong") == 403
    assert status(server, folder.name, token="") == 403


@pytest.mark.parametrize(
    "name",
    ["0123456789ab", "nothing", "..", quote("../../etc", safe=""), "%00", "0123456789ab%0a"],
)
def test_a_missing_cluster_is_not_found(server: JupyterServer, name: str) -> None:
    assert status(server, name) == 404


def test_a_cluster_without_placement_is_not_found(server: JupyterServer, folder: Path) -> None:
    assert status(server, folder.name) == 404


def test_a_link_out_of_the_folder_is_refused(
    server: JupyterServer, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "placement.html").write_text("secret")
    (folder / "placement.html").symlink_to(tmp_path / "placement.html")
    assert status(server, folder.name) == 404
    name = secrets.token_hex(6)
    (server.clusters / name).symlink_to(tmp_path)
    assert status(server, name) == 404


def test_a_page_that_is_too_long_is_refused(server: JupyterServer, folder: Path) -> None:
    (folder / "placement.html").write_bytes(b" " * (PLACEMENT_BYTES + 1))
    assert status(server, folder.name) == 404
    (folder / "placement.html").write_bytes(b" " * PLACEMENT_BYTES)
    assert status(server, folder.name) == 200
