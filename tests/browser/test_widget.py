"""Widget in a JupyterLab without the extension of nbdist."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Page, expect

from nbdist.records import RUN_MIME
from tests.browser import lab as browsers
from tests.browser.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = (
    pytest.mark.full
)  # in `make test`, `tests/views/run/test_live_display.py` feeds the widget
WIDGET = "application/vnd.jupyter.widget-view+json"
TIMEOUT_S = 30
GO_ON = "go-on"
CELLS = [
    "%load_ext nbdist\n%dist_start 2 --framework jax",
    # Makes ten steps, then waits for the file before the other steps.
    f"""%%dist_run -o run
import pathlib, time
for step in range(1, 400):
    while step > 10 and not pathlib.Path({GO_ON!r}).exists():
        time.sleep(0.02)
    report(step=step, loss=1 / step + rank / 10)
    time.sleep(0.02)
    if pathlib.Path({GO_ON!r}).exists() and step > 200:
        break""",
    "%dist_stop",
]
RUNS = """() => window.jupyterapp.shell.currentWidget.content.widgets[1]
  .node.querySelector('.jp-InputPrompt').textContent.includes('*')"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Lab]]:
    """Open a notebook in a JupyterLab that has only the extension of ipywidgets."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "config" / "labconfig").mkdir(parents=True)
    settings = folder / "config" / "labconfig" / "page_config.json"
    settings.write_text(json.dumps({"disabledExtensions": {"nbdist": True}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_VIEW", "widget")
        with Lab(folder) as lab, browsers.browser() as context:
            lab.write("widget.ipynb", CELLS)
            opened = context.new_page()
            lab.open(opened, "widget.ipynb")
            browsers.run(opened, 0)
            yield opened, lab
            (lab.server.home / GO_ON).touch()
            browsers.run(opened, 2)


def step(page: Page) -> int:
    """Return the step that the view shows. 0 if it shows none."""
    text = page.locator(".nbdist-run .nbdist-figures").inner_text()
    found = re.search(r"step\s+([\d,]+)", text, re.IGNORECASE)
    return int(found[1].replace(",", "")) if found else 0


def await_step(page: Page, step_number: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while step(page) < step_number:
        assert time.monotonic() < deadline, page.locator(".nbdist-run").inner_text()
        page.wait_for_timeout(50)


def test_chart_updates_in_the_cell_and_a_picture_remains(
    page: tuple[Page, Lab], pictures: Path
) -> None:
    """Save screenshots for review."""
    tab, lab = page
    browsers.start(tab, 1)
    expect(tab.locator(".nbdist-run")).to_be_visible()
    expect(tab.locator(".nbdist-run")).to_contain_text("running")
    tab.wait_for_function(browsers.DRAWN)
    assert tab.evaluate(RUNS)
    tab.screenshot(path=pictures / "widget-waiting.png")
    await_step(tab, 10)
    assert step(tab) == 10
    (lab.server.home / GO_ON).touch()
    await_step(tab, 50)
    assert tab.evaluate(RUNS)
    expect(tab.get_by_text("To stop the run, interrupt the kernel.")).to_be_visible()
    expect(tab.locator(".nbdist-stop")).to_be_hidden()
    tab.screenshot(path=pictures / "widget-running.png")
    browsers.wait(tab, 1)
    expect(tab.locator(".nbdist-run")).to_have_count(0)
    expect(tab.locator(".jp-OutputArea-output img")).to_be_visible()
    tab.screenshot(path=pictures / "widget-over.png")


def test_a_saved_notebook_contains_the_picture_and_no_widget(page: tuple[Page, Lab]) -> None:
    tab, lab = page
    tab.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    path = lab.server.home / "widget.ipynb"
    saved = nbformat.read(path, as_version=4)
    (output,) = (o for o in saved.cells[1].outputs if RUN_MIME in o.get("data", {}))
    assert set(output.data) == {RUN_MIME, "text/html", "text/plain"}
    assert not saved.metadata.get("widgets")
    html, _ = HTMLExporter().from_filename(str(path))
    assert output.data["text/html"] in html
