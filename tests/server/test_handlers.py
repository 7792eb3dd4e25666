"""Runs, clusters and placements, requested from a real Jupyter server as by a browser."""

from __future__ import annotations

import json
import os
import secrets
import time
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import pytest

from nbdist.records import ClusterState, RunList
from nbdist.server.handlers import PLACEMENT_BYTES
from tests.runs import new_run
from tests.server.jupyter import BASE, TOKEN, JupyterServer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

PAGE = "<details open><summary>params</summary>größer</details>"


@pytest.fixture
def folder(server: JupyterServer) -> Path:
    """Create the folder of a cluster."""
    folder = server.clusters / secrets.token_hex(6)
    folder.mkdir(parents=True)
    return folder


def status(server: JupyterServer, cluster: str) -> int:
    return server.get(f"nbdist/clusters/{cluster}/placement")[0]


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
    for path in (f"nbdist/clusters/{folder.name}/placement", "nbdist/clusters", "nbdist/runs"):
        for token in ("wrong", ""):
            assert server.get(path, token=token)[0] == 403


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


def test_the_newest_runs_are_listed(server: JupyterServer) -> None:
    future = time.time() + 1000
    runs = [new_run(server.runs, began=future + i, status="finished") for i in range(3)]
    runs[2].discard()
    status, body = server.get("nbdist/runs?limit=2")
    assert status == 200
    assert msgspec.json.decode(body, type=RunList).runs == (runs[1].state, runs[0].state)
    for run in runs:
        run.close()


def test_runs_that_cannot_be_read_are_listed_with_the_reason(server: JupyterServer) -> None:
    future = time.time() + 2000
    runs = [new_run(server.runs, began=future + i, status="finished") for i in range(3)]
    for age_s, run in enumerate(runs[1:]):
        (run.path / "run.json").write_text('{"version": 99}')
        os.utime(run.path / "run.json", (future - age_s, future - age_s))
    status, body = server.get("nbdist/runs?limit=1")
    assert status == 200
    listed = msgspec.json.decode(body, type=RunList)
    assert listed.runs == (runs[0].state,)
    version = "another version of nbdist wrote its run.json: it has version 99, and this nbdist"
    assert listed.refused == {runs[1].state.id: f"{version} reads version 1"}
    for run in runs:
        run.discard()


@pytest.mark.parametrize("limit", ["0", "201", "-1", "many", "", "9" * 5000])
def test_an_invalid_limit_is_refused(server: JupyterServer, limit: str) -> None:
    status, body = server.get(f"nbdist/runs?limit={limit}")
    assert status == 400
    assert "limit must be 1 to 200" in json.loads(body)["message"]


def test_clusters_of_running_notebooks_are_listed(server: JupyterServer, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.close()
    current = run.state.writer
    ended = type(current)(host=current.host, pid=current.pid, started=current.started - 10)
    for name, writer in (("a", current), ("b", ended)):
        state = ClusterState(id=name, frameworks=("jax",), workers=(), run="", writer=writer)
        (server.clusters / name).mkdir(parents=True)
        (server.clusters / name / "cluster.json").write_bytes(msgspec.json.encode(state))
    (server.clusters / "c").mkdir()
    (server.clusters / "c" / "cluster.json").write_text("{")
    status, body = server.get("nbdist/clusters")
    assert status == 200
    assert [state.id for state in msgspec.json.decode(body, type=list[ClusterState])] == ["a"]
