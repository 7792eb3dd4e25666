"""Panel, status bar and tab of a run, with a cluster without workers and runs without training."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from playwright.sync_api import Page, Route, WebSocket, expect

from nbdist.records import ClusterState, WorkerState
from nbdist.telemetry.run_reader import StoredRun
from nbdist.utils.files import replace_file
from nbdist.utils.processes import this_process
from tests.browser.lab import (
    TIMEOUT_MS,
    Lab,
    change_theme,
    revert,
    run,
    sources,
    start,
    violations,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from playwright.sync_api import BrowserContext

CELLS = [
    "from tests.browser import synthetic",
    "synthetic.cluster()",
    "kept = synthetic.run(60)",
]
IMPORT, CLUSTER, RUN = range(3)
NAME = "panel-alone.ipynb"
OUTPUT = ".nbdist-RunOutput"
_IN_VIEW = """element => {
  const [shown, area] = [element, element.closest('.jp-WindowedPanel-outer')].map(
    part => part.getBoundingClientRect());
  return shown.top >= area.top && shown.bottom <= area.bottom;
}"""
"""Script that returns true if the notebook shows the whole element without scrolling."""


@pytest.fixture(autouse=True, scope="module")
def set_timeout() -> None:
    expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def tab(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """Open the notebook, whose kernel can write clusters and runs."""
    lab.write(NAME, CELLS)
    page = window.new_page()
    lab.open(page, NAME)
    run(page, IMPORT)
    yield page
    page.close()


@pytest.fixture
def notebook(lab: Lab, tab: Page) -> Iterator[Page]:
    """Reset the notebook without a cluster, and open the panel."""
    errors: list[str] = []

    def record_error(error: object) -> None:
        errors.append(str(error))

    tab.on("pageerror", record_error)
    lab.write(NAME, CELLS)
    revert(tab)
    for file in lab.server.clusters.glob("*/cluster.json"):
        file.unlink()
    command(tab, "nbdist:open-panel")
    tab.get_by_role("form", name="Start cluster").wait_for()
    yield tab
    for kept in lab.server.runs.glob("*"):
        StoredRun(kept).ask_to_stop()  # a run may be active
    tab.unroute_all()
    tab.remove_listener("pageerror", record_error)
    assert not errors


def command(page: Page, name: str, **arguments: object) -> None:
    """Execute a command of the front end."""
    page.evaluate(
        "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }",
        [name, arguments],
    )


def stop(page: Page) -> None:
    """Stop the notebook's run from its toolbar."""
    button = page.get_by_role("toolbar").get_by_role("button", name="Stop run")
    expect(button).to_be_enabled()
    button.click()
    expect(page.locator(OUTPUT, has_text="stopped")).to_be_visible()
    wait(page, RUN)


@pytest.mark.full
def test_all_views_of_a_run_share_one_socket_until_they_close(
    notebook: Page,
) -> None:
    sockets: list[WebSocket] = []
    notebook.on("websocket", lambda s: sockets.append(s) if "/nbdist/runs/" in s.url else None)
    run(notebook, CLUSTER)
    start(notebook, RUN)
    notebook.locator(f"{OUTPUT} canvas").first.wait_for()
    rate = f"nbdist: 4 workers · {256 / 0.05:,.0f} samples/s"
    expect(notebook.get_by_role("button", name=rate)).to_be_visible()
    command(notebook, "nbdist:open-latest-run")
    notebook.locator(".nbdist-RunTab canvas").first.wait_for()
    assert len(sockets) == 1  # shared by the output, the tab, the panel and the status bar
    command(notebook, "application:close")
    notebook.wait_for_function("() => document.querySelector('.nbdist-RunTab') === null")
    if not sockets[0].is_closed():
        with sockets[0].expect_event("close", timeout=TIMEOUT_MS):
            stop(notebook)
    assert all(socket.is_closed() for socket in sockets)


def test_state_of_a_worker_with_a_long_host_name_is_in_view(lab: Lab, notebook: Page) -> None:
    worker = WorkerState(rank=0, host=80 * "long-", pid=1, versions={}, devices=(), state="dead")
    state = ClusterState(
        id="0123456789ab",
        frameworks=("jax",),
        workers=(worker,),
        run="",
        writer=this_process(),
        kernel="",
    )
    folder = lab.server.clusters / state.id
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "cluster.json", msgspec.json.encode(state))
    panel = notebook.get_by_role("region", name="nbdist clusters and runs")
    cell = panel.get_by_role("cell", name="dead", exact=True)
    expect(cell).to_be_visible()
    cell_box, panel_box = cell.bounding_box(), panel.bounding_box()
    assert cell_box is not None
    assert panel_box is not None
    assert cell_box["x"] + cell_box["width"] < panel_box["x"] + panel_box["width"]
    assert cell_box["height"] < 30
    expect(panel.get_by_title(worker.host)).to_be_visible()


def test_stop_ends_the_active_run_and_not_the_previous_one(lab: Lab, notebook: Page) -> None:
    """The page polls the server every 2 s. Meanwhile, one run may end and another one begin."""
    is_old, kept = False, dict[str, str]()

    def answer(route: Route) -> None:
        if is_old and route.request.url in kept:
            route.fulfill(body=kept[route.request.url], content_type="application/json")
        else:
            response = route.fetch()
            kept[route.request.url] = response.text()
            route.fulfill(response=response)

    start(notebook, RUN)
    button = notebook.get_by_role("toolbar").get_by_role("button", name="Stop run")
    notebook.route(re.compile("/nbdist/(runs|clusters)"), answer)
    expect(button).to_be_enabled()
    is_old = True
    StoredRun(max(lab.server.runs.iterdir())).ask_to_stop()
    wait(notebook, RUN)
    start(notebook, RUN)
    notebook.locator(f"{OUTPUT} canvas").first.wait_for()
    expect(button).to_be_enabled()
    is_old = False
    button.click()
    expect(notebook.locator(OUTPUT, has_text="stopped")).to_be_visible()
    wait(notebook, RUN)


@pytest.mark.full
def test_the_panel_resizes_a_cluster_by_a_cell(notebook: Page) -> None:
    panel = notebook.get_by_role("region", name="nbdist clusters and runs")
    form = panel.get_by_role("form", name="Start cluster")
    form.get_by_label("Hosts").fill("0")
    form.get_by_role("button", name="Start cluster").click()
    assert sources(notebook) == CELLS  # an invalid form does nothing
    run(notebook, CLUSTER)
    change = panel.get_by_role("form", name="Resize or stop the cluster")
    change.get_by_label("Hosts").fill("2")
    change.get_by_role("button", name="Resize").click()
    wait_for_cells(notebook, 4)
    assert sources(notebook)[2] == "%dist_resize 2 hosts"


def wait_for_cells(page: Page, cells: int) -> None:
    count = "window.jupyterapp.shell.currentWidget.content.widgets.length"
    page.wait_for_function(f"cells => {count} === cells", arg=cells)


def test_snippets_are_inserted_and_settings_survive_a_reload(notebook: Page) -> None:
    hosts = notebook.get_by_role("form", name="Start cluster").get_by_label("Hosts")
    with notebook.expect_response(
        lambda answer: "workspaces" in answer.url and answer.request.method == "PUT"
    ):
        hosts.fill("7")
    notebook.get_by_role("button", name="Cell that starts the cluster").click()
    wait_for_cells(notebook, 4)
    assert sources(notebook)[1] == "%load_ext nbdist\n%dist_start 7 hosts"
    notebook.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    notebook.goto(notebook.url.replace("&reset", ""))
    expect(hosts).to_have_value("7")


def test_active_run_is_visible_and_the_panel_opens_its_workers(
    notebook: Page, pictures: Path, themes: Sequence[str]
) -> None:
    """The chart is visible without scrolling, and a disabled button has a tooltip."""
    notebook.set_viewport_size({"width": 1000, "height": 700})
    run(notebook, CLUSTER)
    start(notebook, RUN)
    chart = notebook.locator(f"{OUTPUT} .nbdist-plot").first
    expect(chart.locator("canvas").first).to_be_visible()
    notebook.locator(".nbdist-Running").wait_for()
    panel = notebook.get_by_role("region", name="nbdist clusters and runs")
    stop_cluster = panel.get_by_role("button", name="Stop cluster")
    expect(stop_cluster).to_be_disabled()
    expect(stop_cluster).to_have_attribute("title", "A run is active: stop it first")
    for theme in themes:
        change_theme(notebook, theme)
        notebook.screenshot(path=pictures / f"small-{theme.split()[1].lower()}.png")
        assert violations(notebook, "#nbdist-panel") == []
    assert chart.evaluate(_IN_VIEW)
    notebook.set_viewport_size({"width": 1400, "height": 900})
    notebook.locator("#nbdist-panel").get_by_role("button", name="2", exact=True).click()
    notebook.get_by_text("host2 · pid 2").wait_for()
    command(notebook, "application:close")


@pytest.mark.full
def test_notebook_7_reconnects_to_a_restarted_server(
    tmp_path: Path, window: BrowserContext
) -> None:
    """Notebook 7 has no status bar, and shows one document at a time."""
    with Lab(tmp_path / "files", "notebook") as lab, window.new_page() as page:
        lab.write("run.ipynb", CELLS)
        lab.open(page, "run.ipynb")
        run(page, IMPORT)
        start(page, RUN)
        output = page.locator(OUTPUT)
        output.locator("canvas").first.wait_for()
        command(page, "nbdist:open-panel")
        panel = page.get_by_role("region", name="nbdist clusters and runs")
        panel.locator("[data-status=running]").wait_for()
        command(page, "nbdist:open-latest-run")
        page.locator(".nbdist-RunTab canvas").first.wait_for()
        panel.get_by_role("button", name="Stop run").click()
        expect(output).to_contain_text("stopped")
        start(page, RUN)
        expect(output).to_contain_text("running")
        with page.expect_websocket(lambda socket: "/nbdist/runs/" in socket.url):
            lab.server.stop()
            lab.server.start()
        expect(output).to_contain_text("lost")
