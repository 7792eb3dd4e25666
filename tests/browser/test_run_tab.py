"""Runs that are no cell's, in a tab of a real JupyterLab: long ones, odd ones, those that go."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import Columns, Rows
from tests.browser.lab import TIMEOUT_MS
from tests.runs import new_run, rows, writing_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import BrowserContext, Locator, Page

    from tests.browser.lab import Lab

COLUMNS = Columns(measures=("step_s",), own=("loss",))
GROWTH_BYTES = 60e6
"""What the page may hold more after a million points: less than the points themselves take."""


@pytest.fixture(scope="module")
def tab(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """A JupyterLab without a notebook."""
    page = window.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    lab.show(page, waits_for="#jp-main-dock-panel")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-run')")
    yield page
    page.close()
    assert not errors


SETTLES = """([id, ms]) => Promise.race([
  window.jupyterapp.commands.execute('nbdist:stop-run', {id}).then(() => true),
  new Promise(resolve => setTimeout(() => resolve(false), ms)),
])"""


def show(page: Page, run: str) -> Locator:
    command = "id => window.jupyterapp.commands.execute('nbdist:open-run', {id})"
    page.evaluate(command, run)
    shown = page.locator(f"#nbdist-run-{run} .nbdist-run")
    shown.wait_for()
    return shown


def steps(first: int, last: int, rank: int = 0) -> Rows:
    """Steps `first` to `last`, of which each took a hundredth of a second."""
    step = np.arange(first, last + 1, dtype=float)
    values = np.column_stack(
        [
            np.full_like(step, rank),
            np.ones_like(step),
            step,
            0.01 * step,
            np.full_like(step, 0.01),
            1 / step,
        ]
    )
    return Rows(rank=rank, cell=1, columns=COLUMNS, values=values.tobytes())


def held_bytes(page: Page) -> float:
    """What the page's script holds after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used: float = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return used


def test_the_memory_of_the_page_stays_flat_over_a_million_points(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs, steps=1_000_000)
    run.take(steps(1, 10_000))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_text("10,000 of 1,000,000").wait_for()
    before = held_bytes(tab)
    for first in range(10_001, 1_000_001, 99_000):
        run.take(steps(first, first + 98_999))
        run.flush()
    shown.get_by_text("1,000,000 of 1,000,000").wait_for()
    assert held_bytes(tab) - before < GROWTH_BYTES
    label = shown.get_by_role("img").first.get_attribute("aria-label") or ""
    assert "from step 1 to step 1,000,000" in label
    run.update(status="finished", ended=time.time())
    run.close()


def test_metrics_that_are_odd_are_shown_as_far_as_they_go(lab: Lab, tab: Page) -> None:
    """Not a number, infinite, only on one rank, late, under another name; a clock that jumps."""
    run = new_run(lab.server.runs)
    own = Columns(own=("loss",))
    run.take(rows([[0, 1, 1, 5.0, np.nan], [0, 1, 2, 1.0, np.inf], [0, 1, 3, 900.0, 2.0]], own))
    run.take(rows([[1, 1, 1, 5.1, 3.0]], own, rank=1))
    run.take(rows([[1, 1, 2, 5.2, 7.0]], Columns(own=("renamed",)), rank=1))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("combobox", name="Metric").wait_for()
    names = shown.get_by_role("combobox", name="Metric").locator("option").all_inner_texts()
    assert [name.split()[0] for name in names] == ["loss", "renamed"]
    run.take(rows([[0, 1, 4, 901.0, 1.5]], Columns(own=("late",))))
    run.flush()
    shown.locator("option", has_text="late").wait_for(state="attached")
    shown.get_by_text("Workers (2)").wait_for()
    run.update(status="finished", ended=time.time())
    run.close()


def test_of_a_kernel_that_died_it_says_so_and_shows_what_there_is(lab: Lab, tab: Page) -> None:
    program = (
        "run = new_run(root)\nrun.take(losses(1, 50))\nrun.flush()\n"
        "print(run.state.id, flush=True)\ntime.sleep(60)"
    )
    with writing_process(program, lab.server.runs) as writer:
        assert writer.stdout is not None
        shown = show(tab, writer.stdout.readline().strip())
        shown.locator(".nbdist-pill", has_text="running").wait_for()
        writer.kill()
    shown.locator(".nbdist-pill", has_text="lost").wait_for()
    assert "from step 1 to step 50" in (
        shown.get_by_role("img").first.get_attribute("aria-label") or ""
    )
    assert shown.get_by_role("button", name="Stop").count() == 0
    shown.get_by_text("unknown").nth(1).wait_for()  # of both ranks, which ran


def test_of_a_run_that_is_deleted_what_was_seen_stays(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 30))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("img").first.wait_for()
    shutil.rmtree(run.path)
    shown.get_by_text("the run was deleted; what was seen of it stays here").wait_for()
    assert shown.get_by_role("img").count()
    run.close()


def test_of_many_workers_bands_and_those_outside_of_them_are_shown(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    for rank in range(100):
        run.take(steps(1, 50, rank))
    run.flush()
    shown = show(tab, run.state.id)
    label = shown.get_by_role("img").first
    label.wait_for()
    assert "100 ranks" in (label.get_attribute("aria-label") or "")
    assert shown.get_by_role("img").count() >= 2, "the bands, and the map of all ranks"
    run.update(status="finished", ended=time.time())
    run.close()


def test_stop_of_a_run_that_is_over_and_still_shown_settles(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs, header="%%dist_run was over")
    run.take(steps(1, 30))
    run.flush()
    run.update(status="finished", ended=time.time())
    run.close()
    tab.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-panel')")
    tab.get_by_role("button", name="was over").wait_for()
    with tab.expect_websocket(lambda opened: run.state.id in opened.url) as opened:
        show(tab, run.state.id)
    if not opened.value.is_closed():
        opened.value.wait_for_event("close")
    assert tab.evaluate(SETTLES, [run.state.id, TIMEOUT_MS / 10])


def test_a_run_that_does_not_stop_can_be_broken_off(lab: Lab, tab: Page) -> None:
    """Its step never ends: the second Stop is another word on the same button."""
    run = new_run(lab.server.runs, stoppable=True)
    run.take(steps(1, 30))
    run.update(status="stopping")
    run.flush()
    shown = show(tab, run.state.id)
    assert shown.get_by_role("button", name="Stopping").count() == 1
    shown.get_by_role("button", name="Break off").click()
    shown.get_by_role("button", name="Stopping").wait_for()
    deadline = time.monotonic() + 10
    while run.stops_requested() != 1 and time.monotonic() < deadline:
        tab.wait_for_timeout(50)
    assert run.stops_requested() == 1
    run.update(status="stopped", ended=time.time())
    run.close()
