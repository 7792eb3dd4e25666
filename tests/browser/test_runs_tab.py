"""Tab of all stored runs in a JupyterLab, without a kernel."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from playwright.sync_api import expect

from nbdist.telemetry.annotations import annotate, read_annotations
from tests.browser.lab import TIMEOUT_MS, change_theme, revert, until, violations
from tests.runs import losses, new_run, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import BrowserContext, Locator, Page

    from nbdist.telemetry.run_writer import RunDirectory
    from tests.browser.lab import Lab

RUNS = 60
NAME = "training.ipynb"
CELL = "cell-of-the-run"
SIZES = {"wide": (1400, 900), "narrow": (1000, 700)}


@pytest.fixture(autouse=True, scope="module")
def set_timeout() -> None:
    expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def stored(lab: Lab) -> Iterator[list[RunDirectory]]:
    """Provide ended runs, oldest first. The newest ones have edits."""
    path = lab.write(NAME, ["first = 1", "%%dist_run --data train\nlr = 0.1"])
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].id = CELL
    nbformat.write(notebook, path)
    now = time.time() + 1000  # newer than the runs of other modules
    runs = [_run(lab, number, now + 60 * number, path) for number in range(RUNS)]
    annotate(runs[-1].path, {"name": "wide model", "tags": ["baseline", "wide"], "note": "best"})
    annotate(runs[-2].path, {"name": "small model", "tags": ["baseline"]})
    yield runs
    for run in runs:
        run.discard()


def _run(lab: Lab, number: int, began: float, notebook: Path) -> RunDirectory:
    run = new_run(
        lab.server.runs,
        began=began,
        ended=began + 30 + number,
        status="failed" if number % 10 == 0 else "finished",
        error="ValueError: no memory" if number % 10 == 0 else "",
        label=number,
        name=f"digits --epochs {number}",
        header=f"%%dist_run --data digits --epochs {number}",
        batch=64,
        hyperparameters={
            "--batch": 64,
            "batch": 64,
            "optimizer": "Adam",
            "learning_rate": 0.1 / (1 + number),
            "width": 64,
        },
        notebook=str(notebook),
        cell=CELL,
    )
    for rank in (0, 1):
        steps = range(1, 201)
        values = [[rank, 1, s, s / 10, (1 + number / 10) / s + 0.02 * (s % 7)] for s in steps]
        run.take(rows(values, rank=rank))
    run.close()
    return run


@pytest.fixture(scope="module")
def opened(lab: Lab, window: BrowserContext, stored: list[RunDirectory]) -> Iterator[Page]:
    del stored
    page = window.new_page()
    lab.show(page, waits_for="#jp-main-dock-panel")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-panel')")
    yield page
    page.close()


@pytest.fixture
def tab(opened: Page) -> Iterator[Locator]:
    """Open the tab anew, and fail on errors of the page."""
    errors: list[str] = []

    def record_error(error: object) -> None:
        errors.append(str(error))

    opened.on("pageerror", record_error)
    opened.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-runs')")
    found = opened.locator(".nbdist-RunsTab")
    line(found, "wide model").wait_for()
    yield found
    opened.evaluate("() => window.jupyterapp.commands.execute('application:close-all')")
    found.wait_for(state="detached")
    opened.remove_listener("pageerror", record_error)
    assert not errors


def line(tab: Locator, text: str) -> Locator:
    """Return the line of a run in the table."""
    return tab.locator("tr[data-run]", has_text=text)


def names(tab: Locator) -> list[str]:
    """Return the names of the lines in the page, in order."""
    return tab.locator("tr[data-run] .nbdist-Link").all_inner_texts()


def search(tab: Locator, text: str) -> None:
    tab.get_by_role("searchbox", name="Search runs").fill(text)


def test_panel_opens_the_table_of_all_runs(opened: Page, stored: list[RunDirectory]) -> None:
    del stored
    opened.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-panel')")
    panel = opened.get_by_role("region", name="nbdist clusters and runs")
    panel.get_by_role("button", name="All runs").click()
    table = opened.get_by_role("table", name="Stored runs")
    expect(table).to_have_attribute("aria-rowcount", re.compile(r"\d{2,}"))
    headers = table.get_by_role("columnheader").all_inner_texts()
    for name in ("Status", "Duration", "Tags", "loss", "batch", "optimizer", "learning_rate"):
        assert any(name in header for header in headers), name
    assert len([header for header in headers if "batch" in header]) == 1
    cells = line(opened.locator(".nbdist-RunsTab"), "wide model")
    for text in ("finished", "baseline", "Adam", "64", "1 min 29 s"):
        expect(cells).to_contain_text(text)
    opened.evaluate("() => window.jupyterapp.commands.execute('application:close-all')")


@pytest.mark.full
def test_only_lines_in_view_are_in_the_page(tab: Locator) -> None:
    search(tab, "digits")
    lines = tab.locator("tr[data-run]")
    assert lines.count() < RUNS
    tab.locator(".nbdist-RunsScroll").evaluate("element => element.scrollTo(0, 1e6)")
    line(tab, "--epochs 0").wait_for()
    assert lines.count() < RUNS


def test_search_sort_and_filters_choose_runs(tab: Locator) -> None:
    search(tab, "tag=baseline learning_rate<0.00168")
    expect(tab.get_by_role("status")).to_have_text(re.compile(r"^1 of \d+ runs$"))
    assert names(tab) == ["wide model"]
    search(tab, "tag=baseline")
    expect(tab.locator("tr[data-run]")).to_have_count(2)
    duration = tab.get_by_role("columnheader", name="Duration")
    duration.get_by_role("button").click()
    expect(duration).to_have_attribute("aria-sort", "ascending")
    assert names(tab) == ["small model", "wide model"]
    duration.get_by_role("button").click()
    expect(duration).to_have_attribute("aria-sort", "descending")
    assert names(tab) == ["wide model", "small model"]
    search(tab, "digits")
    tab.get_by_label("Filter by status").select_option("failed")
    expect(tab.get_by_role("status")).to_have_text(re.compile(rf"^{RUNS // 10} of \d+ runs$"))
    tab.get_by_label("Filter by status").select_option("")
    tab.get_by_label("Filter by tag").select_option("wide")
    expect(tab.get_by_role("status")).to_have_text(re.compile(r"^1 of \d+ runs$"))


@pytest.mark.full  # labextension/test/runs.test.ts tests the groups
def test_runs_are_grouped_by_tag(tab: Locator) -> None:
    tab.get_by_label("Group by tag").check()
    group = tab.get_by_role("button", name=re.compile("^baseline"))
    expect(group).to_contain_text("2")
    expect(line(tab, "wide model")).to_have_count(2)
    group.click()
    expect(group).to_have_attribute("aria-expanded", "false")
    expect(line(tab, "wide model")).to_have_count(1)
    expect(line(tab, "small model")).to_have_count(0)


def test_edits_are_stored_beside_the_run(
    tab: Locator, opened: Page, stored: list[RunDirectory]
) -> None:
    run = stored[-3]
    before = line(tab, f"--epochs {RUNS - 3}")
    before.get_by_role("button", name=re.compile("^Edit")).click()
    dialog = opened.get_by_role("dialog")
    dialog.get_by_label("Name").fill("renamed")
    dialog.get_by_label("Tags").fill("deep, deep,  slow")
    dialog.get_by_label("Note").fill("diverges")
    dialog.get_by_role("button", name="Save").click()
    renamed = line(tab, "renamed")
    expect(renamed).to_contain_text("slow")
    renamed.get_by_role("button", name=re.compile("^Pin")).click()
    expect(renamed.get_by_role("button", pressed=True)).to_be_visible()
    edits = read_annotations(run.path)
    assert (edits.name, edits.tags, edits.note) == ("renamed", ("deep", "slow"), "diverges")
    assert edits.pinned
    assert names(tab)[0] == "renamed"
    renamed.get_by_role("button", pressed=True).click()
    expect(renamed.get_by_role("button", pressed=True)).to_have_count(0)


@pytest.mark.full  # tests/server/test_run_handlers.py tests the deletion
def test_deletion_is_confirmed(tab: Locator, opened: Page, stored: list[RunDirectory]) -> None:
    run = stored.pop(0)
    search(tab, run.state.id)
    line(tab, "--epochs 0").get_by_role("checkbox").check()
    tab.get_by_role("button", name="Delete…").click()
    dialog = opened.get_by_role("dialog")
    expect(dialog).to_contain_text("Delete 1 run?")
    dialog.get_by_role("button", name="Cancel").click()
    assert run.path.exists()
    tab.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(tab.get_by_text("No run matches the filter.")).to_be_visible()
    assert not run.path.exists()


@pytest.mark.full
def test_an_active_run_is_not_deleted(tab: Locator, opened: Page, lab: Lab) -> None:
    active = new_run(lab.server.runs, name="active run")
    active.take(losses(1, 3))
    active.flush()
    try:
        search(tab, "active")
        running = line(tab, "active run")
        running.get_by_role("checkbox").check()
        expect(running).to_contain_text("running")
        tab.get_by_role("button", name="Delete…").click()
        dialog = opened.get_by_role("dialog")
        expect(dialog).to_contain_text("Stop the run first")
        opened.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        active.take(losses(4, 1234))
        active.flush()
        expect(running).to_contain_text("1,234")
    finally:
        active.discard()


def test_curves_of_selected_runs_share_their_axes(tab: Locator) -> None:
    for name in ("wide model", "small model"):
        line(tab, name).get_by_role("checkbox").check()
    chart = tab.get_by_role("img", name="Chart of loss for 2 runs")
    legend = tab.get_by_role("group", name="Last values")
    expect(legend.get_by_role("listitem")).to_have_count(2)
    expect(legend).to_contain_text(re.compile(r"0\.\d+"))
    pixels = "plot => plot.querySelector('canvas').toDataURL()"
    before = chart.evaluate(pixels)
    value = legend.get_by_role("listitem").first.locator("span").last
    rough = value.inner_text()
    tab.get_by_label("Smoothing").fill("0.9")
    expect(value).not_to_have_text(rough)
    tab.get_by_label("Log scale").check()
    until(tab.page, lambda: chart.evaluate(pixels) != before)
    box = chart.bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(tab.get_by_role("group", name=re.compile(r"^Step \d+"))).to_be_visible()
    tab.get_by_label("Axis").select_option("time")
    tab.page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    expect(tab.get_by_role("group", name=re.compile(r" s$"))).to_be_visible()
    tab.get_by_role("button", name="Clear selection").click()
    expect(chart).to_have_count(0)


@pytest.mark.full  # labextension/test/runs.test.ts tests the export
def test_an_export_contains_the_shown_runs(tab: Locator, opened: Page) -> None:
    search(tab, "tag=baseline")
    expect(tab.locator("tr[data-run]")).to_have_count(2)
    with opened.expect_download() as download:
        tab.get_by_role("button", name="Export CSV").click()
    exported = Path(download.value.path()).read_text("utf-8").splitlines()
    assert exported[0].startswith("id,name,status,started,duration,tag,workers,step,loss,batch")
    assert len(exported) == 3
    assert '"baseline, wide"' in exported[1]


def test_cells_of_a_run_are_shown(tab: Locator, opened: Page) -> None:
    line(tab, "wide model").get_by_role("button", name=re.compile("^Show the cells")).click()
    expect(opened.locator(".nbdist-CellsTab")).to_contain_text("%%dist_run --data train")


@pytest.mark.full
def test_notebook_opens_at_the_cell_of_a_run(tab: Locator, opened: Page) -> None:
    line(tab, "wide model").get_by_role("button", name=re.compile("^Open the notebook")).click()
    opened.locator(".jp-Notebook .jp-Cell.jp-mod-active", has_text="%%dist_run").wait_for()
    revert(opened)  # and wait for the kernel: a disposal before that is an error of the page
    # JupyterLab asks whether to save the notebook before it closes it.
    opened.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")


@pytest.mark.full
def test_arrow_keys_move_between_lines(tab: Locator, opened: Page) -> None:
    first, second = names(tab)[:2]
    tab.get_by_role("button", name=first, exact=True).focus()
    opened.keyboard.press("ArrowDown")
    expect(tab.get_by_role("button", name=second, exact=True)).to_be_focused()
    opened.keyboard.press("ArrowUp")
    opened.keyboard.press("Shift+Tab")
    opened.keyboard.press("Shift+Tab")
    opened.keyboard.press("Space")
    expect(tab.get_by_role("status")).to_contain_text("1 selected")


@pytest.mark.parametrize("size", ["wide", pytest.param("narrow", marks=pytest.mark.full)])
def test_tab_has_no_accessibility_violations(
    tab: Locator, opened: Page, pictures: Path, themes: Sequence[str], size: str
) -> None:
    width, height = SIZES[size]
    opened.set_viewport_size({"width": width, "height": height})
    for name in ("wide model", "small model"):
        line(tab, name).get_by_role("checkbox").check()
    expect(tab.get_by_role("group", name="Last values")).to_contain_text(re.compile(r"0\.\d+"))
    tab.locator(".u-over").wait_for()
    for theme in themes:
        change_theme(opened, theme)
        assert violations(opened, ".nbdist-RunsTab") == []
        opened.screenshot(path=pictures / f"runs tab {size} {theme.split()[1]}.png")
    opened.set_viewport_size({"width": 1400, "height": 900})
