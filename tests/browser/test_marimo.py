"""Run view in a real marimo, which has neither a Jupyter kernel nor magics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Error, expect

from tests.browser.lab import TIMEOUT_MS
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

APP = """
import marimo

app = marimo.App()


@app.cell
def _():
    import pathlib
    import nbdist
    cluster = nbdist.Cluster(hosts=2, framework="jax")
    return cluster, pathlib


@app.cell
def _(cluster, pathlib):
    run = cluster.run(
        '''
        import pathlib, time
        step = 0
        while step < 40 or not pathlib.Path({end!r}).exists():
            step += 1
            report(step=step, loss=1 / step + rank / 10)
            time.sleep(0.02)
        '''
    )
    cluster.stop()
    return
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve a notebook that has not run yet, and provide its URL."""
    (tmp_path / "app.py").write_text(APP.replace("{end!r}", repr(str(tmp_path / "end"))))
    port = str(free_port())
    arguments = ["--headless", "--no-token", "--skip-update-check", "--port", port]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "marimo", "edit", *arguments, "--host", "127.0.0.1", "app.py"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
    yield f"http://127.0.0.1:{port}/"
    server.terminate()
    server.wait(TIMEOUT_MS / 1000)


def open_when_ready(page: Page, address: str) -> None:
    for _ in range(TIMEOUT_MS // 100):
        try:
            page.goto(address, wait_until="domcontentloaded")
        except Error:
            page.wait_for_timeout(100)
        else:
            return
    raise AssertionError("the server does not answer")


@pytest.mark.full  # tests/views/run/test_live_display.py feeds the widget in `make test`
def test_chart_updates_in_the_cell_and_a_picture_remains(
    address: str, page: Page, tmp_path: Path
) -> None:
    expect.set_options(timeout=TIMEOUT_MS)
    open_when_ready(page, address)
    page.locator("[data-testid=run-button]:not(.inactive-button)").last.click()
    expect(page.locator(".nbdist-pill")).to_contain_text("running")
    chart = page.get_by_role("img", name="Chart of loss")
    words = chart.get_attribute("aria-label") or ""
    expect(chart).not_to_have_attribute("aria-label", words)
    (tmp_path / "end").touch()
    picture = page.locator("img[alt^='Chart of loss']")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 600
    assert not page.locator(".nbdist-run").count()
