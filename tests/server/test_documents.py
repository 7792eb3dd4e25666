"""Documents and example notebooks, requested from a real Jupyter server as by a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import nbformat
import pytest

from nbdist.server.documents import documents, html

if TYPE_CHECKING:
    from tests.server.jupyter import JupyterServer

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_a_browser_receives_documents_pictures_and_examples(server: JupyterServer) -> None:
    for name, content in (
        ("README.md", b"<h1"),
        ("docs/runs.md", b"<h2"),
        ("docs/images/run.png", b"PNG"),
    ):
        status, body = server.get(f"nbdist/documents/{name}")
        assert status == 200
        assert content in body
    for framework in ("tensorflow", "jax"):
        status, body = server.get(f"nbdist/examples/{framework}")
        assert status == 200
        nbformat.validate(nbformat.from_dict(json.loads(body)))


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "examples/torch",
        "documents/docs/nothing.md",
        "documents/pyproject.toml",
        "documents/" + quote("../nbdist/settings.py", safe=""),
        "documents/docs/" + quote("../../README.md", safe=""),
    ],
)
def test_other_files_are_not_found(server: JupyterServer, name: str) -> None:
    assert server.get(f"nbdist/{name}")[0] == 404


@pytest.mark.processes
def test_requests_without_the_token_are_refused(server: JupyterServer) -> None:
    for name in ("documents/README.md", "examples/jax"):
        assert server.get(f"nbdist/{name}", token="wrong")[0] == 403


def test_a_page_has_the_title_and_the_tables_of_its_document() -> None:
    page = html("# Runs & views\n\n| a | b |\n|---|---|\n| `x` | [y](y.md#z) |\n")
    assert "<title>Runs &amp; views</title>" in page
    assert "<td><code>x</code></td>" in page
    assert '<a href="y.md#z">y</a>' in page


def test_the_documents_are_those_of_the_source_tree() -> None:
    assert documents() == ROOT
