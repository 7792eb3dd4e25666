"""Recovered run in a tab of a JupyterLab. It is recorded as in a kernel, but without workers."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.execution import live_run
from nbdist.records import CellRequest, Columns, RecoveryRecord, Rows, StepBegun, WorkerState
from nbdist.settings import Settings
from tests.browser.lab import PIXELS, change_theme, until, violations
from tests.runs import send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Locator, Page

    from nbdist.execution.live_run import LiveRun
    from tests.browser.lab import Lab

RANKS = 4
STEP_S = 0.05
STEPS = 40
DIED, SAVED = 23, 12
LOST_S = 1.4
RECOVERY = RecoveryRecord(
    time_s=STEP_S * DIED + LOST_S,
    ranks=(2,),
    reason=f"rank 2 died after step {DIED}",
    step=SAVED,
    lost_s=LOST_S,
)
WORDS = "recovered: rank 2 died after step 23, resumed after step 12, 1.4 s lost"
COLUMNS = Columns(measures=("step_s",), own=("loss",), shared=("accuracy",))
THEMES = ("JupyterLab Light", "JupyterLab Dark")
CELLS = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
PART = """mark => {
  const {left, width} = mark.parentElement.getBoundingClientRect();
  return (mark.getBoundingClientRect().left - left) / width;
}"""


def begin(lab: Lab) -> LiveRun:
    """Begin a step cell on all ranks, before its first step."""
    workers = [
        WorkerState(rank=rank, host=f"host{rank}", pid=4000 + rank, versions={}, devices=())
        for rank in range(RANKS)
    ]
    header = "%%dist_run --data train --checkpoint here"
    request = CellRequest(number=1, source="", label=3, strategy="mirrored", awaits=False)
    run = live_run.begin(
        request, header, [header], workers, Settings(runs_folder=str(lab.server.runs))
    )
    send(
        run,
        StepBegun(
            rank=0,
            cell=1,
            replicas=RANKS,
            batch=256,
            samples=-1,
            epochs=1,
            steps=STEPS,
            sharding="",
            rates=(),
        ),
    )
    return run


def report(run: LiveRun, first: int, last: int, began_s: float = 0.0) -> None:
    """Report steps of all ranks and flush them to the readers.

    Args:
        run: the run.
        first: first step.
        last: last step.
        began_s: start of the first step, in seconds since the start of the run.
    """
    step = np.arange(first, last + 1, dtype=float)
    time_s = began_s + STEP_S * (step - first + 1)
    for rank in range(RANKS):
        loss = 2 / (1 + 0.1 * step) + 0.05 * rank * np.cos(step)
        columns = [np.full_like(step, rank), np.ones_like(step), step, time_s]
        columns += [np.full_like(step, STEP_S), loss, 1 - 1 / step]
        values = np.column_stack(columns).tobytes()
        send(run, Rows(rank=rank, cell=1, columns=COLUMNS, values=values))
    time.sleep(live_run.FLUSH_INTERVAL_S)
    run.tick()


def recover(run: LiveRun) -> None:
    run.recovered(RECOVERY, {rank: 5000 + rank for rank in range(RANKS)})


@pytest.fixture(scope="module")
def tab(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """Open a JupyterLab without a notebook."""
    page = window.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    open_lab(lab, page)
    yield page
    page.close()
    assert not errors


def open_lab(lab: Lab, page: Page) -> None:
    lab.show(page, waits_for="#jp-main-dock-panel")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-run')")


def show(page: Page, run: LiveRun) -> Locator:
    command = "id => window.jupyterapp.commands.execute('nbdist:open-run', {id})"
    page.evaluate(command, run.id)
    shown = page.locator(f"#nbdist-run-{run.id} .nbdist-run")
    shown.get_by_role("img", name="Chart of loss").wait_for()
    return shown


def table(page: Page, shown: Locator) -> list[list[str]]:
    """Return the data of the chart: the heading, and a row for each step."""
    data = shown.locator("details", has=page.locator("table.nbdist-data")).first
    if data.get_attribute("open") is None:
        data.locator("summary").click()
    until(page, lambda: len(read(shown)) > 1)
    return read(shown)


def read(shown: Locator) -> list[list[str]]:
    rows: list[list[str]] = shown.locator("table.nbdist-data").first.evaluate(CELLS)
    return rows


def wait_until_drawn(page: Page, shown: Locator, step: int) -> None:
    """Wait until the chart and its label end with this step."""
    shown.get_by_role("img", name=re.compile(f"Chart of loss.* to step {step}\\.")).wait_for()
    until(page, lambda: table(page, shown)[-1][0] == f"step {step}", lambda: table(page, shown))


def mark_of(shown: Locator) -> Locator:
    """Return the mark of the recovery in the first chart."""
    return shown.get_by_role("figure").first.get_by_role("img", name=WORDS, exact=True)


def steps(rows: Sequence[Sequence[str]]) -> list[str]:
    return [row[0] for row in rows[1:]]


def pixels_of(shown: Locator) -> str:
    """Return the pixels of the chart."""
    pixels: str = shown.get_by_role("img", name="Chart of loss").locator("canvas").evaluate(PIXELS)
    return pixels


def test_tab_follows_a_run_through_its_recovery(lab: Lab, tab: Page) -> None:
    whole = begin(lab)
    report(whole, 1, STEPS)
    undisturbed = show(tab, whole)
    wait_until_drawn(tab, undisturbed, STEPS)
    rows, lines = table(tab, undisturbed), pixels_of(undisturbed)
    whole.end("finished")

    run = begin(lab)
    report(run, 1, DIED)
    shown = show(tab, run)
    wait_until_drawn(tab, shown, DIED)
    run.lost([2])
    run.recovering(RECOVERY.reason)
    shown.locator(".nbdist-pill", has_text="recovering").wait_for()
    shown.get_by_text(RECOVERY.reason, exact=True).wait_for()
    shown.get_by_role("row", name="4002").get_by_text("dead").wait_for()
    recover(run)
    wait_until_drawn(tab, shown, SAVED)
    report(run, SAVED + 1, DIED + 2, RECOVERY.time_s)
    wait_until_drawn(tab, shown, DIED + 2)
    shown.locator(".nbdist-pill", has_text="running").wait_for()
    shown.get_by_role("row", name="5002").get_by_text("running").wait_for()
    assert shown.locator("li").filter(has_text=WORDS).count() == 1
    report(run, DIED + 3, STEPS, RECOVERY.time_s + STEP_S * (DIED + 2 - SAVED))
    wait_until_drawn(tab, shown, STEPS)
    assert table(tab, shown) == rows
    assert steps(rows) == [f"step {step}" for step in range(1, STEPS + 1)]
    until(tab, lambda: pixels_of(shown) == lines)

    mark = mark_of(shown)
    assert mark.count() == 1
    part = mark.locator("..").evaluate(PART)
    assert part == pytest.approx((SAVED - 1) / (STEPS - 1), abs=0.005)
    open_lab(lab, tab)
    again = show(tab, run)
    wait_until_drawn(tab, again, STEPS)
    assert table(tab, again) == rows
    assert mark_of(again).count() == 1
    run.end("finished")


@pytest.fixture(scope="module")
def shown(lab: Lab, tab: Page) -> Locator:
    """Show a recovered run that has ended."""
    run = begin(lab)
    report(run, 1, DIED)
    recover(run)
    report(run, SAVED + 1, STEPS, RECOVERY.time_s)
    run.end("finished")
    shown = show(tab, run)
    wait_until_drawn(tab, shown, STEPS)
    return shown


def test_a_recovery_mark_shows_its_text_on_hover_and_focus(tab: Page, shown: Locator) -> None:
    mark = mark_of(shown)
    readout = shown.locator(".nbdist-readout").first
    mark.hover()
    readout.get_by_text(WORDS).wait_for()
    tab.mouse.move(0, 0)
    until(tab, lambda: readout.inner_text() == "")
    shown.get_by_role("group", name="loss", exact=True).focus()
    tab.keyboard.press("Tab")
    assert mark.evaluate("mark => mark === document.activeElement")
    readout.get_by_text(WORDS).wait_for()
    tab.keyboard.press("Tab")
    until(tab, lambda: readout.inner_text() == "")


def test_a_recovery_mark_follows_axis_and_zoom(tab: Page, shown: Locator) -> None:
    mark = mark_of(shown)
    shown.get_by_label("Time", exact=True).check()
    whole_s = LOST_S + STEP_S * (DIED + STEPS - SAVED - 1)
    part = (RECOVERY.time_s - STEP_S) / whole_s
    place = mark.locator("..")
    until(tab, lambda: abs(place.evaluate(PART) - part) < 0.005, lambda: place.evaluate(PART))
    shown.get_by_label("Step", exact=True).check()
    plot = shown.get_by_role("group", name="loss", exact=True)
    plot.focus()

    def is_beyond() -> bool:
        tab.keyboard.press("+")
        return not mark.is_visible()

    until(tab, is_beyond)
    tab.keyboard.press("0")
    mark.wait_for()


@pytest.mark.parametrize(
    ("theme", "forced"),
    [
        pytest.param(THEMES[0], "active", marks=pytest.mark.full),
        (THEMES[1], "none"),
        pytest.param(THEMES[0], "none", marks=pytest.mark.full),
        pytest.param(THEMES[1], "active", marks=pytest.mark.full),
    ],
)
def test_a_recovery_mark_is_visible_in_every_colour_mode(
    tab: Page, shown: Locator, theme: str, forced: str, pictures: Path
) -> None:
    change_theme(tab, theme)
    scheme = "dark" if theme.endswith("Dark") else "light"
    tab.emulate_media(forced_colors=forced, color_scheme=scheme)  # type: ignore[arg-type]
    colour = "mark => getComputedStyle(mark).color"
    mark = mark_of(shown)
    assert mark.evaluate(colour) != shown.evaluate("view => getComputedStyle(view).backgroundColor")
    assert violations(tab, ".nbdist-RunTab .nbdist-run") == []
    shown.screenshot(path=pictures / f"recovered {scheme}, forced {forced}.png")
    tab.emulate_media(forced_colors="null", color_scheme="null")
    change_theme(tab, THEMES[0])
