"""Runs without a cell, in a tab of a real JupyterLab: long, unusual, lost and deleted ones."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import nbdist
from nbdist.jobs import submission
from nbdist.records import SIGNALS, Columns, Finding, Rows
from nbdist.telemetry.annotations import annotate
from nbdist.utils.polling import repeat_until
from tests.browser.lab import PIXELS, TIMEOUT_MS, until
from tests.runs import new_run, rows, writing_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import BrowserContext, Locator, Page

    from nbdist.telemetry.run_writer import RunDirectory
    from tests.browser.lab import Lab

COLUMNS = Columns(measures=("step_s",), own=("loss",))
LIMIT_S = 120
POINTS = 1_000_000
POINT_BYTES = 8 * len(COLUMNS.names)
FULL_BYTES = POINTS * POINT_BYTES / 6
"""Limit for the page's growth until its bins are full. All points would need six times as much."""
FLAT_BYTES = POINTS * POINT_BYTES / 24
"""Limit for the growth with full bins, which leaves room for temporary objects only."""

OUTSIDE = {37: 9.0}
"""First loss of the ranks that differ strongly from the others."""
SETTLES = """([id, ms]) => Promise.race([
  window.jupyterapp.commands.execute('nbdist:stop-run', {id}).then(() => true),
  new Promise(resolve => setTimeout(() => resolve(false), ms)),
])"""
APART = """figures => {
  const all = figures.getBoundingClientRect();
  const boxes = [...figures.querySelectorAll('bdi')].map(one => one.getBoundingClientRect());
  const isApart = (a, b) =>
    a.right < b.left || b.right < a.left || a.bottom < b.top || b.bottom < a.top;
  const shown = boxes.filter(box => box.width > 0);
  return shown.length > 5 && shown.every((box, i) => box.right <= all.right &&
    box.bottom <= all.bottom && shown.slice(i + 1).every(other => isApart(box, other)));
}"""
"""Script that returns true if all figures are in view and none is above another one."""

CELLS = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"


@pytest.fixture(autouse=True)
def forget_layout(tab: Page) -> None:
    tab.evaluate("() => localStorage.removeItem('nbdist:charts')")


@pytest.fixture(scope="module")
def tab(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """Open a JupyterLab without a notebook."""
    page = window.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    lab.show(page, waits_for="#jp-main-dock-panel")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-run')")
    yield page
    page.close()
    assert not errors


def show(page: Page, run: str) -> Locator:
    command = "id => window.jupyterapp.commands.execute('nbdist:open-run', {id})"
    page.evaluate(command, run)
    shown = page.locator(f"#nbdist-run-{run} .nbdist-run")
    shown.wait_for()
    return shown


def steps(first: int, last: int, rank: int = 0, loss: float = 1) -> Rows:
    """Return steps `first` to `last` of 0.01 s each. `loss` is the loss of step 1."""
    step = np.arange(first, last + 1, dtype=float)
    values = np.column_stack(
        [
            np.full_like(step, rank),
            np.ones_like(step),
            step,
            0.01 * step,
            np.full_like(step, 0.01),
            loss / step,
        ]
    )
    return Rows(rank=rank, cell=1, columns=COLUMNS, values=values.tobytes())


def end(run: RunDirectory) -> None:
    run.update(status="finished", ended=time.time())
    run.close()


def label(shown: Locator) -> str:
    """Return the accessible label of the first chart."""
    return shown.get_by_role("img").first.get_attribute("aria-label") or ""


def table(shown: Locator) -> list[list[str]]:
    """Return the data table of the first chart: the heading, and a row for each position."""
    read: list[list[str]] = shown.locator("table.nbdist-data").first.evaluate(CELLS)
    return read


def open_table(page: Page, shown: Locator) -> None:
    shown.get_by_text("Data", exact=True).first.click()
    until(page, lambda: "rank 0" in (table(shown) or [[]])[0])


def shown_range(shown: Locator) -> tuple[int, int]:
    """Return the first and the last step in the data table."""
    rows = table(shown)
    return int(rows[1][0].split()[1]), int(rows[-1][0].split()[1])


def held_bytes(page: Page) -> float:
    """Return the bytes of objects and typed arrays of the page after a garbage collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    session.detach()
    held: float = usage["usedSize"] + usage["backingStorageSize"]
    return held


def take_steps(run: RunDirectory, first: int, last: int) -> None:
    """Report the steps in messages of up to 100,000 steps."""
    for begin in range(first, last + 1, 100_000):
        run.take(steps(begin, min(begin + 99_999, last)))
        run.flush()


@pytest.mark.full
def test_page_memory_stays_flat_over_a_million_points(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs, steps=POINTS)
    shown = show(tab, run.state.id)
    held, first = list[float](), 1
    for last in (POINTS // 100, POINTS // 2, POINTS):
        take_steps(run, first, last)
        shown.get_by_text(f"{last:,} of {POINTS:,}").wait_for()
        held.append(held_bytes(tab))
        first = last + 1
    assert held[1] - held[0] < FULL_BYTES
    assert held[2] - held[1] < FLAT_BYTES
    assert "from step 1 to step 1,000,000" in label(shown)
    end(run)


@pytest.fixture
def chart(lab: Lab, tab: Page) -> Locator:
    """Show a finished run of 200 steps with the data table of its loss."""
    run = new_run(lab.server.runs)
    run.take(steps(1, 200))
    run.flush()
    end(run)
    shown = show(tab, run.state.id)
    open_table(tab, shown)
    until(tab, lambda: shown_range(shown) == (1, 200))
    return shown


@pytest.mark.full
def test_logarithmic_scale_and_smoothing_are_drawn(tab: Page, chart: Locator) -> None:
    canvas = chart.get_by_role("img").first.locator("canvas").first
    pixels, rows = canvas.evaluate(PIXELS), table(chart)
    log = chart.get_by_role("button", name="Logarithmic scale of loss")
    log.click()
    until(tab, lambda: canvas.evaluate(PIXELS) != pixels)
    assert table(chart) == rows
    log.click()
    until(tab, lambda: canvas.evaluate(PIXELS) == pixels)
    chart.get_by_label("Smoothing").fill("40")
    until(tab, lambda: float(table(chart)[-1][1]) > 2 * float(rows[-1][1]))
    assert canvas.evaluate(PIXELS) != pixels
    chart.get_by_label("Smoothing").fill("0")
    until(tab, lambda: table(chart) == rows)


def test_a_drag_zooms_and_pans_with_shift(tab: Page, chart: Locator) -> None:
    plot = chart.locator(".nbdist-over").first
    assert shown_range(chart) == (1, 200)
    drag(tab, plot, 0.25, 0.5)
    until(tab, lambda: is_near(shown_range(chart), (50, 100)), lambda: shown_range(chart))
    tab.keyboard.down("Shift")
    drag(tab, plot, 0.75, 0.25)
    tab.keyboard.up("Shift")
    until(tab, lambda: is_near(shown_range(chart), (75, 125)), lambda: shown_range(chart))
    chart.get_by_role("button", name="Reset zoom").click()
    until(tab, lambda: shown_range(chart) == (1, 200))


def drag(page: Page, plot: Locator, start: float, stop: float) -> None:
    """Drag from one fraction of the plot's width to another."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + stop * box["width"], middle, steps=5)
    page.mouse.up()


def is_near(found: tuple[int, int], wanted: tuple[int, int]) -> bool:
    """Compare steps with a tolerance, because the chart includes a column beyond either end."""
    return all(abs(a - b) <= 5 for a, b in zip(found, wanted, strict=True))


def charts(shown: Locator) -> list[str]:
    """Return the titles of the charts."""
    return shown.locator(".nbdist-chart .nbdist-heading").all_inner_texts()


def test_metrics_share_a_cursor_and_keep_their_layout_after_a_reload(
    lab: Lab, tab: Page, pictures: Path
) -> None:
    run = new_run(lab.server.runs)
    columns = Columns(own=("loss", "accuracy", "learning_rate"))
    run.take(rows([[0, 1, s, 0.1 * s, 8 / s, s / 200, 0.01] for s in range(1, 201)], columns))
    run.flush()
    end(run)
    shown = show(tab, run.state.id)
    shown.get_by_role("figure").nth(2).wait_for()
    accuracy = shown.get_by_role("figure").nth(1)
    shown.locator(".nbdist-over").first.hover()
    accuracy.get_by_text(re.compile(r"^step (99|10[0-4])$")).wait_for()
    tab.screenshot(path=pictures / "grid.png")
    tab.mouse.move(0, 0)
    accuracy.get_by_text(re.compile(r"^step \d+$")).wait_for(state="detached")

    shown.get_by_role("button", name="Logarithmic scale of loss").click()
    shown.get_by_role("button", name="Full width for accuracy").click()
    shown.get_by_label("Smoothing").fill("20")
    shown.get_by_label("Filter").fill("RATE")
    until(tab, lambda: charts(shown) == ["learning_rate"])
    shown.get_by_label("Filter").fill("")
    until(tab, lambda: len(charts(shown)) == 3)
    tab.reload()
    tab.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-run')")
    tab.evaluate("() => window.jupyterapp.restored.then(() => true)")
    shown = show(tab, run.state.id)
    shown.get_by_role("figure").nth(2).wait_for()
    pressed = shown.locator("button[aria-pressed=true][title]:not(.nbdist-chip)")
    titles = ["Logarithmic scale of loss", "Full width for accuracy"]
    until(tab, lambda: [button.get_attribute("title") for button in pressed.all()] == titles)
    assert shown.get_by_label("Smoothing").input_value() == "20"


def test_charts_of_signals_show_their_interval_and_last_value(
    lab: Lab, tab: Page, pictures: Path
) -> None:
    run = new_run(lab.server.runs, kind="fit", signal_steps=20)
    seldom = Columns(shared=("loss", *SIGNALS))
    for step in range(1, 201):
        values = [0, 1, step, 0.1 * step, 8 / step]
        if step % 20 == 0:
            run.take(rows([[*values, *(0.5 for _ in SIGNALS)]], seldom))
        else:
            run.take(rows([values], Columns(shared=("loss",))))
    run.flush()
    end(run)
    shown = show(tab, run.state.id)
    signals = [f"{name} (every 20 steps)" for name in SIGNALS]
    until(tab, lambda: charts(shown) == ["loss (by step, as Keras logs it)", *signals])
    headings = shown.locator(".nbdist-chart .nbdist-heading")
    assert headings.evaluate_all("all => all.every(one => one.scrollWidth <= one.clientWidth)")
    shown.locator(".nbdist-over").first.hover()
    norm = shown.get_by_role("figure").nth(1)
    norm.get_by_text("step 100", exact=True).wait_for()
    assert norm.locator(".nbdist-chip-value").inner_text() == "0.5000"
    tab.screenshot(path=pictures / "signals.png")


def test_figures_of_a_long_run_fit_into_a_narrow_view(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs, batch=64, epochs=4000, steps=512_000, began=time.time() - 60)
    run.take(steps(101_001, 101_200))
    run.flush()
    shown = show(tab, run.state.id)
    figures = shown.locator(".nbdist-figures")
    figures.get_by_text("remaining").wait_for()
    tab.set_viewport_size({"width": 1000, "height": 700})
    until(tab, lambda: figures.evaluate(APART))
    tab.set_viewport_size({"width": 1400, "height": 900})
    end(run)


def test_unusual_metrics_and_times_are_shown(lab: Lab, tab: Page) -> None:
    """NaN, infinity, a metric of one rank, late and renamed metrics, and a jump of the clock."""
    run = new_run(lab.server.runs)
    own = Columns(own=("loss",))
    run.take(rows([[0, 1, 1, 5.0, np.nan], [0, 1, 2, 1.0, np.inf], [0, 1, 3, 900.0, 2.0]], own))
    run.take(rows([[1, 1, 1, 5.1, 3.0]], own, rank=1))
    run.take(rows([[1, 1, 2, 5.2, 7.0]], Columns(own=("renamed",)), rank=1))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("figure").nth(1).wait_for()
    assert charts(shown) == ["loss", "renamed"]
    run.take(rows([[0, 1, 4, 901.0, 1.5]], Columns(own=("late",))))
    run.flush()
    until(tab, lambda: charts(shown) == ["loss", "renamed", "late"])
    shown.get_by_text("Workers (2)").wait_for()
    open_table(tab, shown)
    assert "Not finite, first near step 1." in label(shown)
    assert [row[2] for row in table(shown)[1:]] == ["nan", "nan", "2", ""]
    shown.get_by_label("Time", exact=True).check()
    until(tab, lambda: table(shown)[0][0] == "time")
    assert [row[0] for row in table(shown)[1:]] == ["5 s", "5 s", "15 min 04 s", "15 min 05 s"]
    assert "from 5 s to 15 min 05 s" in label(shown)
    end(run)


def top(element: Locator) -> float:
    """Return the distance of an element from the top of its view, in pixels."""
    height: float = element.evaluate(
        """element => element.getBoundingClientRect().top
             - element.closest('.nbdist-run').getBoundingClientRect().top"""
    )
    return height


def test_warnings_open_below_the_chart_which_does_not_move(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 30))
    run.flush()
    shown = show(tab, run.state.id)
    chart = shown.get_by_role("img").first
    chart.wait_for()
    before = top(chart)
    slow = Finding("straggler", "rank 1 is slow: `%dist_status`", (1,), 1.5)
    run.update(steps=100, batch=64, findings=(slow, Finding("starved", "ranks wait for data")))
    badge = shown.get_by_role("button", name="2 warnings")
    badge.wait_for()
    shown.get_by_text("of 100").first.wait_for()
    findings = shown.get_by_role("list", name="Findings")
    assert findings.is_hidden()
    badge.click()
    findings.get_by_role("listitem").nth(1).wait_for()
    assert findings.evaluate("list => list.checkVisibility()")
    assert top(chart) == before < top(findings)
    end(run)


def test_an_error_without_its_cell_is_one_line_that_opens(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 3))
    run.flush()
    error = "ValueError on rank 0@here: too many\n\nin user code:\n\n  File 'f'"
    run.update(status="failed", error=error, ended=time.time())
    run.close()
    shown = show(tab, run.state.id)
    shown.get_by_text("ValueError on rank 0@here: too many", exact=True).wait_for()
    full = shown.get_by_role("group", name="Error of the run")
    assert full.is_hidden()
    shown.get_by_role("button", name="Show the error").click()
    assert full.inner_text() == error
    shown.get_by_role("button", name="Hide the error").click()
    full.wait_for(state="hidden")


def test_a_new_name_appears_in_open_views(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs, name="digits")
    run.take(steps(1, 3))
    end(run)
    shown = show(tab, run.state.id)
    shown.locator(".nbdist-title", has_text="digits").wait_for()
    annotate(run.path, {"name": "wide model"})
    shown.locator(".nbdist-title", has_text="wide model").wait_for()
    tab.locator(".lm-TabBar-tabLabel", has_text="wide model").wait_for()


@pytest.mark.full  # session/test_tensorboard.py shows a run, the next test opens the tab
def test_tensorboard_shows_a_run_in_a_tab(lab: Lab, tab: Page, pictures: Path) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 200))
    end(run)
    other = new_run(lab.server.runs)
    other.take(steps(1, 3))
    end(other)
    show(tab, run.state.id)
    toolbar = tab.locator(f"#nbdist-run-{run.state.id}").get_by_role("toolbar")
    toolbar.get_by_role("button", name="Open TensorBoard").click()
    board = tab.locator(f"#nbdist-board-{run.state.id}").frame_locator("iframe")
    board.get_by_text("loss", exact=True).first.wait_for()
    board.get_by_text(f"{run.state.id}/events/rank-0").first.wait_for()
    assert board.get_by_text(other.state.id).count() == 0
    tab.screenshot(path=pictures / "tensorboard.png")


def test_a_server_without_tensorboard_is_explained(lab: Lab, tab: Page) -> None:
    tab.route(re.compile("/nbdist-tensorboard/"), lambda route: route.fulfill(status=404))
    tab.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-tensorboard')")
    alert = tab.locator("#nbdist-board-all").get_by_role("alert")
    alert.get_by_text('pip install "nbdist[tensorboard]"').wait_for()
    tab.unroute_all()


def test_a_run_of_a_dead_kernel_is_lost_and_keeps_its_data(lab: Lab, tab: Page) -> None:
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
    assert "from step 1 to step 50" in label(shown)
    assert shown.get_by_role("button", name="Stop").count() == 0
    shown.get_by_text("unknown").nth(1).wait_for()  # for both ranks, which were running


def test_data_of_a_deleted_run_stays_visible(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 30))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("img").first.wait_for()
    shutil.rmtree(run.path)
    shown.get_by_text("the run was deleted: this view keeps the data received so far").wait_for()
    assert shown.get_by_role("img").count()
    run.close()


def test_many_workers_are_shown_as_bands_with_outliers(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    for rank in range(100):
        run.take(steps(1, 50, rank, loss=OUTSIDE.get(rank, 1 + rank / 1000)))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("button", name="rank 37").wait_for()
    until(tab, lambda: "Outliers: rank 37." in label(shown), lambda: label(shown))
    assert "100 ranks" in label(shown)
    assert shown.get_by_role("button", name=re.compile(r"^rank \d+")).count() == len(OUTSIDE)
    assert shown.get_by_role("img").count() >= 2, "the bands and the map of all ranks"
    end(run)


@pytest.mark.full
def test_stop_of_a_run_that_has_ended_completes(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs, name="was over")
    run.take(steps(1, 30))
    run.flush()
    end(run)
    tab.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-panel')")
    tab.get_by_role("button", name="was over").wait_for()
    with tab.expect_websocket(lambda opened: run.state.id in opened.url) as opened:
        show(tab, run.state.id)
    if not opened.value.is_closed():
        opened.value.wait_for_event("close")
    assert tab.evaluate(SETTLES, [run.state.id, TIMEOUT_MS / 10])


@pytest.mark.full
def test_a_run_that_does_not_stop_can_be_canceled(lab: Lab, tab: Page) -> None:
    """The step of the run never ends. The button changes from Stop to Cancel step."""
    run = new_run(lab.server.runs, stoppable=True)
    run.take(steps(1, 30))
    run.update(status="stopping")
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("button", name="Stopping").wait_for()
    shown.get_by_role("button", name="Cancel step").click()
    shown.get_by_role("button", name="Stopping").wait_for()
    until(tab, lambda: run.stops_requested() == 1)
    run.update(status="stopped", ended=time.time())
    run.close()


def test_an_ended_run_without_metrics_has_no_advice(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.update(status="failed", error="KeyError on rank 0@here: 'x'", ended=time.time())
    run.close()
    shown = show(tab, run.state.id)
    shown.get_by_text("The run reported no metrics.", exact=True).wait_for()


def test_the_run_of_a_program_without_a_job_has_no_stop_button(lab: Lab, tab: Page) -> None:
    """A process beside its rank 0 writes the run, so it is live."""
    for program, number in (("", 1), ("train.py", 0)):
        run = new_run(lab.server.runs, program=program)
        run.take(steps(1, 3))
        run.flush()
        shown = show(tab, run.state.id)
        shown.locator(".nbdist-pill").get_by_text("running").wait_for()
        assert shown.get_by_role("button", name="Stop").count() == number
        reason = shown.get_by_text("Stop the program where it was started.")
        assert reason.count() == 1 - number
        run.update(status="finished", ended=time.time())
        run.close()


PROGRAM = """
import nbdist
job = nbdist.script("pjrt", seed=3)
import jax, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
train = x, x.sum(1, keepdims=True)
w = jnp.zeros((4, 1))

def step(batch):
    global w
    x, y = batch
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    w = w - 0.0001 * g
    return loss

job.train(step, data="train", batch=16, epochs=1_000_000, checkpoint="checkpoints")
job.close()
"""


@pytest.mark.full  # tests/server/test_run_handlers.py tests the cancellation
def test_stop_cancels_the_job_of_a_run(
    lab: Lab, tab: Page, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = f"exec {shlex.quote(sys.executable)} -m nbdist.cli run train.py --hosts 2"
    (tmp_path / "run.sh").write_text(command)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    submission.start(tmp_path, "local", (), {}, lab.server.runs)
    job = nbdist.job(tmp_path)
    try:
        assert repeat_until(lambda: bool(job.runs), LIMIT_S), job.logs()
        shown = show(tab, job.run.id)
        shown.locator("canvas").first.wait_for()
        tab.screenshot(path=pictures / "job.png")
        shown.get_by_role("button", name="Stop job").click()
        shown.locator(".nbdist-pill").get_by_text("stopped").wait_for()
        assert job.wait(LIMIT_S) == "stopped", job.logs()
        assert "it can continue from its checkpoint" in repr(job)
        assert job.run.state.status == "stopped"
        tab.screenshot(path=pictures / "stopped-job.png")
    finally:
        job.cancel()
        job.wait(LIMIT_S)


def test_a_job_that_cannot_be_stopped_is_explained(lab: Lab, tab: Page, tmp_path: Path) -> None:
    run = new_run(lab.server.runs, program="train.py", job="a", job_folder=str(tmp_path))
    run.take(steps(1, 3))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("button", name="Stop job").click()
    dialog = tab.locator(".jp-Dialog")
    dialog.get_by_text(f"{tmp_path} contains no submitted job").wait_for()
    tab.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    shown.get_by_role("button", name="Stop job").wait_for()
    assert run.stops_requested() == 0
    run.update(status="finished", ended=time.time())
    run.close()
