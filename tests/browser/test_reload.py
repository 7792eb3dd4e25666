"""Reload of a page while a cell runs. The kernel sends its output to the closed page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from nbdist.records import RUN_MIME
from tests.browser.lab import Lab, revert, run, start, until, view, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Page, Route, WebSocketRoute

NAME = "reload.ipynb"
BROKEN = 3000  # a code without a meaning for nbdist, like that of a broken connection
SETUP = """%%dist_run
import pathlib, time
import numpy as np, jax, jax.numpy as jnp
end = pathlib.Path('{end}')
x = np.random.default_rng(0).normal(size=(4096, 16)).astype('float32')
data = (x, x @ np.arange(16, dtype='float32'))
w = jnp.zeros(16)
"""
STEP = """%%dist_run --data data --batch 64 --epochs 100000
xs, ys = batch
loss, g = jax.value_and_grad(lambda w: jnp.mean((xs @ w - ys) ** 2))(w)
w = w - 0.002 * g
"""
UNTIL_END = """%%dist_run
line = 0
while not end.exists():
    {report}
    if rank == 0: print('line', line)
    line += 1
    time.sleep(0.05)
{last}
"""
START, SET_UP, REPORTS, PRINTS, STEPS = range(5)
_RUNS = re.compile(r"/nbdist/runs\?")
_KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
_RECEIVES = f"""() => {_KERNEL} && new Promise(
  resolve => {_KERNEL}.iopubMessage.connect(() => resolve(true)))"""
_SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
_HAS_PICTURE = """index =>
  window.jupyterapp.shell.currentWidget.content.widgets[index]
    .model.outputs.toJSON().some(output => String(output.data?.['text/html']).includes('<img'))"""
_OUTPUTS = """index =>
  window.jupyterapp?.shell.currentWidget?.content.widgets?.[index]?.model.outputs.toJSON() ?? []"""


def cells(end: Path) -> list[str]:
    return [
        "%load_ext nbdist\n%dist_start 2 hosts --framework jax",
        SETUP.format(end=end),
        UNTIL_END.format(report="report(loss=1 / (1 + line))", last=""),
        UNTIL_END.format(
            report="if end.with_name('report').exists(): report(loss=line)",
            last="raise ValueError('at the end')",
        ),
        STEP,
    ]


@pytest.fixture(scope="module")
def front(lab: Lab) -> Lab:
    return lab


@pytest.fixture(scope="module")
def end(front: Lab) -> Path:
    """Return the path of a file that ends the waiting cells."""
    return front.server.home / "end"


@pytest.fixture(scope="module")
def tab(front: Lab, window: BrowserContext, end: Path) -> Iterator[Page]:
    """Open the notebook with two ready workers."""
    front.write(NAME, cells(end))
    page = window.new_page()
    front.open(page, NAME)
    assert "2 workers are ready" in run(page, START)
    run(page, SET_UP)
    yield page
    page.close()


@pytest.fixture
def shown(front: Lab, tab: Page, end: Path) -> Iterator[Page]:
    """Reset the notebook to cells without outputs, none of which runs."""
    end.unlink(missing_ok=True)
    end.with_name("report").unlink(missing_ok=True)
    front.write(NAME, cells(end))
    revert(tab)
    yield tab
    end.touch()
    tab.unroute_all()


def outputs(page: Page, index: int) -> list[dict[str, object]]:
    read: list[dict[str, object]] = page.evaluate(_OUTPUTS, index)
    return read


def text(page: Page, index: int) -> str:
    """Return the text of the cell's outputs."""
    streams = [o for o in outputs(page, index) if o["output_type"] == "stream"]
    return "".join(str(stream["text"]) for stream in streams)


def lines(page: Page, index: int) -> list[int]:
    """Return the numbers of the lines that the cell has printed."""
    return [int(number) for number in re.findall(r"line (\d+)$", text(page, index), re.MULTILINE)]


def wait_for_lines(page: Page, index: int, last: int) -> None:
    def are_there() -> bool:
        printed = lines(page, index)
        return bool(printed) and printed[-1] >= last

    until(page, are_there, lambda: lines(page, index))


def leave_until_more_text(page: Page, lab: Lab) -> None:
    """Leave the page until the run has written more text."""
    file = max(lab.server.runs.glob("*/shown.txt"), key=lambda path: path.stat().st_mtime)
    page.goto("about:blank")
    before = file.stat().st_size
    until(page, lambda: file.stat().st_size > before)


def reload_during_run(page: Page, lab: Lab, index: int) -> None:
    """Leave the page after the cell has printed text, return, and wait until it prints more."""
    wait_for_lines(page, index, 5)
    leave_until_more_text(page, lab)
    lab.show(page, NAME)
    wait_for_lines(page, index, 10)


def saved(page: Page, lab: Lab, index: int) -> list[nbformat.NotebookNode]:
    """Save the notebook and return the cell's outputs in its file."""
    page.evaluate(_SAVE)
    read = nbformat.read(lab.server.home / NAME, as_version=4)
    found: list[nbformat.NotebookNode] = read.cells[index].outputs
    return found


def check_lines(page: Page, index: int) -> None:
    printed = lines(page, index)
    assert printed == list(range(len(printed)))


@pytest.mark.parametrize("is_saved", [False, pytest.param(True, marks=pytest.mark.full)])
def test_chart_and_text_are_restored_and_saved(
    front: Lab, shown: Page, end: Path, is_saved: bool
) -> None:
    start(shown, REPORTS)
    view(shown, REPORTS).wait_for()
    wait_for_lines(shown, REPORTS, 5)
    if is_saved:
        saved(shown, front, REPORTS)
    leave_until_more_text(shown, front)
    front.show(shown, NAME)
    chart = view(shown, REPORTS).get_by_role("img").first
    chart.wait_for()
    shown.locator(".jp-Cell").nth(REPORTS).get_by_text("[*]").wait_for()
    wait_for_lines(shown, REPORTS, 6)
    wait_for_lines(shown, REPORTS, lines(shown, REPORTS)[-1] + 5)
    words = chart.get_attribute("aria-label")
    shown.wait_for_function(
        "([element, words]) => element.ariaLabel !== words", arg=[chart.element_handle(), words]
    )
    check_lines(shown, REPORTS)
    end.touch()
    wait(shown, REPORTS)
    view(shown, REPORTS).locator(".nbdist-pill", has_text="finished").wait_for()
    check_picture(shown, front, REPORTS)
    check_lines(shown, REPORTS)


def check_picture(page: Page, lab: Lab, index: int) -> None:
    """Check that one output contains the ended run, for every front end."""
    page.wait_for_function(_HAS_PICTURE, arg=index)
    (data,) = [o.data for o in saved(page, lab, index) if o.output_type == "display_data"]
    assert set(data) == {RUN_MIME, "text/html", "text/plain"}
    assert data[RUN_MIME]["over"]


@pytest.mark.full  # test_live_run.py tests Stop, and the first test here a restored chart
def test_stop_works_in_a_restored_view(front: Lab, shown: Page) -> None:
    start(shown, STEPS)
    view(shown, STEPS).get_by_role("img").first.wait_for()
    shown.goto("about:blank")
    front.show(shown, NAME)
    run_view = view(shown, STEPS)
    run_view.get_by_role("button", name="Stop run").click()
    run_view.locator(".nbdist-pill", has_text="stopped").wait_for()
    wait(shown, STEPS)
    check_picture(shown, front, STEPS)


@pytest.mark.full  # the first test restores text too
def test_text_and_error_of_a_cell_without_reports_are_restored(
    front: Lab, shown: Page, end: Path
) -> None:
    start(shown, PRINTS)
    reload_during_run(shown, front, PRINTS)
    end.touch()
    wait(shown, PRINTS)
    shown.get_by_text("ValueError: at the end").last.wait_for()
    kinds = [output["output_type"] for output in outputs(shown, PRINTS)]
    assert kinds == ["stream", "error"]
    check_lines(shown, PRINTS)


@pytest.mark.full
def test_a_restored_cell_shows_a_chart_after_its_first_report(
    front: Lab, shown: Page, end: Path
) -> None:
    start(shown, PRINTS)
    reload_during_run(shown, front, PRINTS)
    assert not view(shown, PRINTS).count()
    end.with_name("report").touch()
    view(shown, PRINTS).scroll_into_view_if_needed()
    view(shown, PRINTS).get_by_role("img").first.wait_for()
    end.touch()
    wait(shown, PRINTS)
    shown.wait_for_function(_HAS_PICTURE, arg=PRINTS)
    check_lines(shown, PRINTS)


@pytest.mark.full
def test_a_queued_run_is_shown_after_a_reload(front: Lab, shown: Page, end: Path) -> None:
    start(shown, REPORTS)
    start(shown, STEPS)
    reload_during_run(shown, front, REPORTS)
    end.touch()
    stop = view(shown, STEPS).get_by_role("button", name="Stop run")
    stop.wait_for()
    check_picture(shown, front, REPORTS)
    stop.click()
    wait(shown, STEPS)
    check_picture(shown, front, STEPS)


@pytest.mark.full  # tests/server/test_run_socket.py tests text from a position
def test_text_continues_after_a_broken_connection(front: Lab, shown: Page, end: Path) -> None:
    sockets: list[WebSocketRoute] = []

    def take(socket: WebSocketRoute) -> None:
        socket.connect_to_server()
        sockets.append(socket)

    start(shown, REPORTS)
    wait_for_lines(shown, REPORTS, 5)
    leave_until_more_text(shown, front)
    shown.route_web_socket(re.compile(r"live\?text=1"), take)
    front.show(shown, NAME)
    wait_for_lines(shown, REPORTS, 10)
    sockets[0].close(code=BROKEN)
    wait_for_lines(shown, REPORTS, lines(shown, REPORTS)[-1] + 20)
    assert len(sockets) == 2
    end.touch()
    wait(shown, REPORTS)
    shown.wait_for_function(_HAS_PICTURE, arg=REPORTS)
    check_lines(shown, REPORTS)


@pytest.mark.full
def test_two_pages_show_each_output_once(
    front: Lab, window: BrowserContext, shown: Page, end: Path
) -> None:
    start(shown, REPORTS)
    wait_for_lines(shown, REPORTS, 5)
    with window.new_page() as second:
        front.show(second, NAME)
        wait_for_lines(second, REPORTS, 10)
        end.touch()
        for page in (shown, second):
            wait(page, REPORTS)
            page.wait_for_function(_HAS_PICTURE, arg=REPORTS)
            charts = [o for o in outputs(page, REPORTS) if o["output_type"] == "display_data"]
            assert len(charts) == 1
            check_lines(page, REPORTS)


@pytest.mark.full
def test_a_run_that_ends_before_the_response_has_its_picture(
    front: Lab, shown: Page, end: Path
) -> None:
    """Delay the first list of runs, without which the page does not know the run."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    start(shown, REPORTS)
    wait_for_lines(shown, REPORTS, 5)
    leave_until_more_text(shown, front)
    shown.route(_RUNS, hold)
    front.show(shown, NAME)
    shown.wait_for_function(_RECEIVES)
    end.touch()
    shown.wait_for_function(f"() => {_KERNEL}.status === 'idle'")
    for route in held:
        route.continue_()
    shown.unroute(_RUNS)
    check_picture(shown, front, REPORTS)
    check_lines(shown, REPORTS)


@pytest.mark.full
def test_a_finished_run_without_its_picture_gets_it(front: Lab, shown: Page, end: Path) -> None:
    """The server already lists the run as finished while the kernel still draws its picture."""

    def answer(route: Route) -> None:
        runs = route.fetch().json()
        route.fulfill(json=[{**run, "status": "finished"} for run in runs])

    start(shown, REPORTS)
    wait_for_lines(shown, REPORTS, 5)
    leave_until_more_text(shown, front)
    shown.route(_RUNS, answer)
    front.show(shown, NAME)
    wait_for_lines(shown, REPORTS, 10)
    end.touch()
    check_picture(shown, front, REPORTS)
    check_lines(shown, REPORTS)


@pytest.mark.full
def test_a_page_opened_after_the_end_stays_unchanged(front: Lab, shown: Page, end: Path) -> None:
    end.touch()
    run(shown, REPORTS)
    shown.goto("about:blank")
    front.open(shown, NAME)
    assert outputs(shown, REPORTS) == []


@pytest.mark.full
def test_notebook_7_restores_a_run(lab: Lab, page: Page) -> None:
    notebook, name = lab.as_notebook(), "seven.ipynb"
    lab.write(name, ["from tests.browser import synthetic", "kept = synthetic.run(600)"])
    notebook.open(page, name)
    run(page, 0)
    start(page, 1)
    view(page, 1).get_by_role("img").first.wait_for()
    page.goto("about:blank")
    notebook.show(page, name)
    shown = view(page, 1)
    shown.get_by_role("img").first.wait_for()
    shown.get_by_role("button", name="Stop run").click()
    shown.locator(".nbdist-pill", has_text="stopped").wait_for()
    wait(page, 1)
