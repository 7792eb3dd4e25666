"""A real JupyterLab or Notebook 7 in a real browser."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbformat.sign import NotebookNotary
from playwright.sync_api import sync_playwright

from tests.server.jupyter import BASE, TOKEN, JupyterServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import BrowserContext, Locator, Page

TIMEOUT_MS = 60_000
AXE = Path(__file__).parents[2] / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DRAWN = """() => [...document.querySelectorAll('.nbdist-run canvas')].some(canvas => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(pixels.buffer)).size > 10;
})"""
"""Script that returns true if the chart of a run has been drawn."""

PIXELS = "element => element.toDataURL()"
"""Script that returns the pixels of a canvas."""

_SETTINGS = ("config", "lab", "user-settings", "@jupyterlab", "apputils-extension")
_APPS = ("LabApp", "JupyterNotebookApp")
_IDLE = """() => {
  const widget = window.jupyterapp?.shell.currentWidget;
  return widget?.sessionContext?.session?.kernel?.status === 'idle';
}"""
_RUN = """index => {
  const widget = window.jupyterapp.shell.currentWidget;
  widget.content.activeCellIndex = index;
  void window.jupyterapp.commands.execute('notebook:run-cell');
}"""
_DONE = """index => {
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[index];
  const prompt = cell.node.querySelector('.jp-InputPrompt')?.textContent ?? '';
  return cell.model.executionCount !== null && !prompt.includes('*');
}"""
_SOURCES = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(
  cell => cell.model.sharedModel.source)"""
_OUTPUT = """index =>
  window.jupyterapp.shell.currentWidget.content.widgets[index].outputArea.node.innerText"""


def chromium() -> str | None:
    """Return the path of the browser, or None if it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def browser(**context: Any) -> Iterator[BrowserContext]:
    """Open a headless browser.

    Args:
        **context: options of Playwright's browser context.
    """
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium(), headless=True, args=list(_FLAGS)
        )
        try:
            opened = running.new_context(viewport={"width": 1400, "height": 900}, **context)
            opened.set_default_timeout(TIMEOUT_MS)
            yield opened
        finally:
            running.close()


class Lab:
    """A JupyterLab, or a Notebook 7 with `app="notebook"`.

    Args:
        folder: folder of all its files.
        app: module of the server.
    """

    def __init__(self, folder: Path, app: str = "jupyterlab") -> None:
        self._app = app
        exposed = (f"--{name}.expose_app_in_browser=True" for name in _APPS)
        self.server = JupyterServer(folder, app, tuple(exposed))
        settings = folder.joinpath(*_SETTINGS)
        settings.mkdir(parents=True)
        news = {"fetchNews": "false"}  # without it, a question about news covers the page
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(news))

    def __enter__(self) -> Lab:
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_kernels()
        self.server.__exit__()

    def as_notebook(self) -> Lab:
        """Return a Notebook 7 on the same server, which provides both applications."""
        other = copy.copy(self)
        other._app = "notebook"
        return other

    def end_kernels(self) -> None:
        """Shut down all kernels and thus their clusters."""
        for session in json.loads(self.server.get("api/sessions")[1]):
            self.server.get(f"api/sessions/{session['id']}", method="DELETE")

    def write(self, name: str, cells: list[str]) -> Path:
        """Write a notebook with these code cells."""
        notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        path = self.server.home / name
        nbformat.write(notebook, path)
        return path

    def trust(self, name: str) -> None:
        """Sign a notebook, so that it opens as trusted."""
        notary = NotebookNotary(data_dir=str(self.server.home.with_name("data")))
        notary.sign(nbformat.read(self.server.home / name, as_version=4))
        notary.store.close()

    def open(self, page: Page, name: str) -> None:
        """Open a notebook and wait until its kernel is ready."""
        self.show(page, name)
        page.wait_for_function(_IDLE)

    def address(self, name: str = "") -> str:
        """Return the URL that shows only this notebook."""
        kind = "notebooks" if self._app == "notebook" else "lab/tree" if name else "lab"
        return f"http://{self.server.at}/{BASE}/{kind}/{name}?token={TOKEN}&reset"

    def show(self, page: Page, name: str = "", waits_for: str = ".jp-CodeCell") -> None:
        """Open a notebook, or the start page without a name.

        Args:
            page: page of the browser.
            name: name of the notebook's file.
            waits_for: selector of an element to wait for.
        """
        page.goto(self.address(name), wait_until="domcontentloaded")
        page.wait_for_selector(waits_for)


def open_panel(page: Page) -> Locator:
    """Open the panel and return it."""
    page.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-panel')")
    return page.get_by_role("region", name="nbdist clusters and runs")


def keep(page: Page) -> None:
    """Keep the current notebook as `window.notebook`, for `activate`."""
    page.evaluate("() => { window.notebook = window.jupyterapp.shell.currentWidget; }")


def activate(page: Page) -> None:
    """Show the notebook that `keep` has kept."""
    page.evaluate("() => window.jupyterapp.shell.activateById(window.notebook.id)")
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget === window.notebook")


def revert(page: Page) -> None:
    """Reload the notebook from its file and wait until its kernel is ready."""
    page.wait_for_function(_IDLE)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.context.revert()")
    page.wait_for_function(_IDLE)


def start(page: Page, index: int) -> None:
    """Start a cell without waiting for its end."""
    page.evaluate(_RUN, index)


def wait(page: Page, index: int, timeout_ms: int = 2 * TIMEOUT_MS) -> str:
    """Wait until the cell has run, and return the text of its output."""
    page.wait_for_function(_DONE, arg=index, timeout=timeout_ms)
    text: str = page.evaluate(_OUTPUT, index)
    return text


def run(page: Page, index: int) -> str:
    """Run a cell and return the text of its output."""
    page.wait_for_function(_IDLE)
    start(page, index)
    return wait(page, index)


def until(page: Page, is_so: Callable[[], bool], describe: Callable[[], object] = str) -> None:
    """Wait until `is_so()` is true. An error shows the result of `describe()`."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not is_so():
        assert time.monotonic() < deadline, describe()
        page.wait_for_timeout(50)


def sources(page: Page) -> list[str]:
    """Return the code of every cell."""
    read: list[str] = page.evaluate(_SOURCES)
    return read


def view(page: Page, index: int) -> Locator:
    """Return the run view in the output of a cell."""
    return page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".nbdist-run")


def change_theme(page: Page, theme: str) -> None:
    """Switch the front end to the theme."""
    page.evaluate(
        "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme
    )
    page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
    page.locator("#jupyterlab-splash").wait_for(state="detached")


def violations(page: Page, selector: str) -> list[str]:
    """Return the violations that axe-core finds, each with its element."""
    page.add_script_tag(path=AXE)
    found: list[str] = page.evaluate(
        """selector => axe.run(selector).then(({violations}) => violations.flatMap(
             ({id, nodes}) => nodes.map(({target}) => `${id}: ${target}`)))""",
        selector,
    )
    return found
