"""Output of cells of real workers on the page of a worker, which the panel opens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import run, start, until, violations, wait
from tests.browser.test_live_run import open_panel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Locator, Page

    from tests.browser.lab import Lab

NAME = "worker-log.ipynb"
START, PRINTS, WAITS = range(3)
WAIT = """%%dist_run --name waiting
import pathlib, time
print("begun on", rank)
while not pathlib.Path({file!r}).exists():
    time.sleep(0.05)
print("ended on", rank)
if rank == 1:
    raise ValueError("no such file")
"""


@pytest.fixture(scope="module")
def signal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signal") / "go"


@pytest.fixture(scope="module")
def notebook(lab: Lab, window: BrowserContext, signal: Path) -> Iterator[Page]:
    """Provide a notebook with two workers that have run no cell."""
    cells = [
        "%load_ext nbdist\n%dist_start 2 --framework jax",
        "%%dist_run\nprint('printed by', rank)",
        WAIT.format(file=str(signal)),
    ]
    lab.write(NAME, cells)
    page = window.new_page()
    lab.open(page, NAME)
    run(page, START)
    yield page
    page.close()


def open_worker(page: Page, rank: int) -> Locator:
    cluster = open_panel(page).get_by_role("region", name="2 workers · JAX")
    cluster.get_by_role("button", name=str(rank), exact=True).click()
    shown = page.locator("[id^=nbdist-worker-]:visible")
    shown.get_by_text(re.compile(r"· pid \d+ · cpu")).wait_for()
    return shown


def lines(log: Locator) -> list[str]:
    return [line for line in log.inner_text().splitlines() if line]


# tests/server/test_run_socket.py tests the text of all cells, test_worker_page.py the page
@pytest.mark.full
def test_page_shows_what_a_worker_printed_in_all_cells(
    lab: Lab, notebook: Page, signal: Path, photograph: Callable[[Page, str], None]
) -> None:
    before = set(lab.server.runs.glob("*"))
    shown = open_worker(notebook, 1)
    shown.get_by_text("This worker has printed nothing.").wait_for()
    log = shown.get_by_role("group", name="Log")
    assert log.is_hidden()
    shown.locator(".nbdist-pill", has_text="idle").wait_for()
    photograph(notebook, "worker-new")
    notebook.get_by_role("tab", name=NAME).click()
    run(notebook, PRINTS)
    assert set(lab.server.runs.glob("*")) == before, "a cell without reports stores no run"
    shown = open_worker(notebook, 1)
    until(notebook, lambda: lines(log)[1:] == ["printed by 1"], log.inner_text)
    assert re.fullmatch(r"── Cell 2, \d\d:\d\d ──", lines(log)[0])

    notebook.get_by_role("tab", name=NAME).click()
    start(notebook, WAITS)
    shown = open_worker(notebook, 1)
    until(notebook, lambda: lines(log)[2:] == ["── waiting ──", "begun on 1"], log.inner_text)
    shown.locator(".nbdist-pill", has_text="running").wait_for()
    shown.get_by_role("button", name="Open the run").wait_for()
    shown.get_by_role("tab", name="Stack").click()
    stack = shown.get_by_role("group", name="Stack of the main thread")
    until(notebook, lambda: "time.sleep(0.05)" in stack.inner_text(), stack.inner_text)
    photograph(notebook, "worker-plain-stack")
    shown.get_by_role("tab", name="Log").click()
    signal.touch()
    until(notebook, lambda: lines(log)[-1:] == ["ValueError: no such file"], log.inner_text)
    assert "ended on 1" in lines(log)
    shown.locator(".nbdist-pill", has_text="idle").wait_for()
    photograph(notebook, "worker-plain-log")
    shown.get_by_role("searchbox").fill("ON 1")
    shown.get_by_text(re.compile(r"^2 of \d+ lines$")).wait_for()
    assert violations(notebook, "[id^=nbdist-worker-]") == []
    notebook.get_by_role("tab", name=NAME).click()
    wait(notebook, WAITS)
