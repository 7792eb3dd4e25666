"""A real JupyterLab or Notebook 7 in a real browser."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import nbformat
import pytest
from playwright.sync_api import Page, WebSocket, expect, sync_playwright

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "of-the-tests"
TIMEOUT_S = 40
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
IDLE = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.sessionContext?.session?.kernel?.status === 'idle';
}"""
AXE = Path(__file__).parents[2] / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
VIOLATIONS = """async selector => {
    const { violations } = await axe.run(selector);
    return violations.flatMap(({ id, nodes }) => nodes.map(node => `${id}: ${node.html}`));
}"""
HAS_RUN = """i => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[i];
    return cell.model.executionCount !== null && cell.model.executionState === 'idle';
}"""
RUN = """i => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = i;
    void window.jupyterapp.commands.execute('notebook:run-cell');
}"""


class Jupyter:
    """A server in a process of its own, which may be started anew at the same address."""

    def __init__(self, folder: Path, app: Literal["lab", "notebook"]) -> None:
        self.home = folder / "home"
        self.app = app
        self.home.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.at = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._log = folder / "server.log"
        sources = [str(Path(nbdist.__file__).parents[1]), str(Path(__file__).parent)]
        self._environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": os.pathsep.join(sources),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        arguments = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.at.rpartition(":")[2],
            "ServerApp.port_retries": "0",
            "ServerApp.open_browser": "False",
            "ServerApp.allow_root": "True",
            "ServerApp.root_dir": str(self.home),
            "IdentityProvider.token": TOKEN,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyter", self.app, "--expose-app-in-browser"),
                    *(f"--{name}={value}" for name, value in arguments.items()),
                ],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """End the server, and with it the kernels."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(TIMEOUT_S)
            self._process = None

    def write(self, name: str, cells: list[str]) -> None:
        """Make a notebook of these cells."""
        notebook = nbformat.v4.new_notebook()
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbformat.write(notebook, self.home / name)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.at}/api?token={TOKEN}", timeout=TIMEOUT_S):
                return True
        except urllib.error.URLError:
            return False


class Tab:
    """A page with a notebook in it."""

    def __init__(self, page: Page, jupyter: Jupyter) -> None:
        self.page = page
        self.jupyter = jupyter
        self.sockets: list[WebSocket] = []
        self.errors: list[str] = []
        page.set_default_timeout(1000 * TIMEOUT_S)
        page.on("websocket", self._opened)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, name: str) -> None:
        """Open the notebook, and wait for its kernel."""
        path = "lab/tree" if self.jupyter.app == "lab" else "notebooks"
        self.page.goto(f"{self.jupyter.at}/{path}/{name}?reset&token={TOKEN}")
        self.wait_for(IDLE)

    def run(self, index: int) -> None:
        """Run a cell, and wait for its end."""
        self.begin(index)
        self.wait_for(HAS_RUN, index)

    def begin(self, index: int) -> None:
        """Run a cell, and do not wait."""
        self.page.evaluate(RUN, index)

    def command(self, name: str, **arguments: object) -> Any:
        """Carry out a command of the front end."""
        call = "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }"
        return self.page.evaluate(call, [name, arguments])

    def is_enabled(self, name: str) -> bool:
        return bool(self.page.evaluate("name => window.jupyterapp.commands.isEnabled(name)", name))

    def reload(self) -> None:
        """Load the page anew; the sockets of the one before are gone."""
        self.sockets.clear()
        self.page.reload()

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def sources(self) -> list[str]:
        """The code of every cell."""
        code = (
            "() => window.jupyterapp.shell.currentWidget.content.widgets"
            ".map(cell => cell.model.sharedModel.source)"
        )
        sources: list[str] = self.page.evaluate(code)
        return sources

    def violations(self, selector: str) -> list[str]:
        """What axe-core finds wrong with an element: rule and place of each."""
        self.page.add_script_tag(path=AXE)
        found: list[str] = self.page.evaluate(VIOLATIONS, selector)
        return found

    def wait_for(self, condition: str, argument: object = None) -> None:
        """Wait until JavaScript says so."""
        self.page.wait_for_function(condition, arg=argument)

    def open_sockets(self) -> int:
        """Sockets on runs that are open now."""
        return sum(not socket.is_closed() for socket in self.sockets)

    def _opened(self, socket: WebSocket) -> None:
        if "/nbdist/runs/" in socket.url:
            self.sockets.append(socket)


def pages() -> Iterator[Any]:
    """A browser's context; the browser is Debian's, which may lack."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on the path")
    expect.set_options(timeout=1000 * TIMEOUT_S)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_context(viewport={"width": 1400, "height": 900})
        browser.close()
