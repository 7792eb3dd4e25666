"""The extension in a real JupyterLab: outputs and the panel follow real run directories."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.labextension.browser import Jupyter, Tab, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

CELLS = [
    "import shutil, synthetic",
    "synthetic.cluster()",
    "kept = synthetic.run(60)",
    "print('later')",
    "shutil.rmtree(kept.path)",
]
OUTPUT = ".nbdist-RunOutput"


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    with Jupyter(tmp_path_factory.mktemp("lab"), "lab") as server:
        yield server


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    yield from pages()


@pytest.fixture
def tab(jupyter: Jupyter, context: Any, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A page with a notebook of the test's own, and the panel open."""
    name = f"{request.node.name}.ipynb"
    jupyter.write(name, CELLS)
    tab = Tab(context.new_page(), jupyter)
    tab.open(name)
    tab.run(0)
    tab.command("nbdist:open-panel")
    tab.page.get_by_role("region", name="nbdist clusters and runs").wait_for()
    yield tab
    tab.page.close()
    assert not tab.errors


def stop(tab: Tab) -> None:
    """Stop the notebook's run from its toolbar."""
    button = tab.page.get_by_role("toolbar").get_by_role("button", name="Stop run")
    expect(button).to_be_enabled()
    button.click()
    expect(tab.page.locator(OUTPUT, has_text="stopped")).to_be_visible()


def test_a_run_is_seen_while_its_cell_is_busy_and_after_a_reload(tab: Tab) -> None:
    page = tab.page
    tab.run(1)
    assert not tab.is_enabled("nbdist:stop-run")
    tab.begin(2)
    page.locator(f"{OUTPUT} canvas").first.wait_for()
    rate = f"nbdist: 4 workers · {256 / 0.05:,.0f} samples/s"
    expect(page.get_by_role("button", name=rate)).to_be_visible()
    tab.save()
    tab.reload()
    page.locator(f"{OUTPUT} canvas").first.wait_for()
    assert tab.open_sockets() == 1  # of the output, the panel and the status bar together
    stop(tab)
    tab.run(3)
    expect(page.locator(".jp-OutputArea-output", has_text="later")).to_be_visible()


def test_what_nobody_looks_at_is_not_followed(tab: Tab) -> None:
    page = tab.page
    tab.begin(2)
    page.locator(f"{OUTPUT} canvas").first.wait_for()
    tab.command("nbdist:open-latest-run")
    page.locator(".nbdist-RunTab canvas").first.wait_for()
    tab.command("application:close")
    tab.wait_for("() => document.querySelector('.nbdist-RunTab') === null")
    stop(tab)
    deadline = time.monotonic() + 20
    while tab.open_sockets() and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert tab.open_sockets() == 0


def test_an_output_whose_run_is_gone_shows_its_picture(tab: Tab) -> None:
    page = tab.page
    tab.begin(2)
    page.locator(f"{OUTPUT} canvas").first.wait_for()
    stop(tab)
    tab.run(4)
    tab.save()
    tab.reload()
    picture = page.locator(f"{OUTPUT} img")
    picture.wait_for()
    assert picture.get_attribute("alt") == "the run was stopped"
    assert (picture.get_attribute("src") or "").startswith("data:image/png;base64,")


def test_the_panel_starts_and_resizes_by_cells_of_the_notebook(tab: Tab) -> None:
    panel = tab.page.get_by_role("region", name="nbdist clusters and runs")
    start = panel.get_by_role("form", name="Start a cluster")
    start.get_by_label("Hosts").fill("0")
    start.get_by_role("button", name="Start").click()
    assert tab.sources() == CELLS  # a form that is not valid does nothing
    tab.run(1)
    change = panel.get_by_role("form", name="Change the cluster")
    change.get_by_label("Hosts").fill("2")
    change.get_by_role("button", name="Resize").click()
    resized = "%dist_stop\n%dist_start 2 hosts --framework tensorflow"
    tab.wait_for("() => window.jupyterapp.shell.currentWidget.content.widgets.length === 6")
    assert tab.sources()[2] == resized


def test_snippets_are_inserted_and_the_wish_outlives_a_reload(tab: Tab) -> None:
    page = tab.page
    hosts = page.get_by_role("form", name="Start a cluster").get_by_label("Hosts")
    with page.expect_response(
        lambda answer: "workspaces" in answer.url and answer.request.method == "PUT"
    ):
        hosts.fill("7")
    page.get_by_role("button", name="Start a cluster", exact=True).click()
    tab.wait_for("() => window.jupyterapp.shell.currentWidget.content.widgets.length === 6")
    assert tab.sources()[1] == "%load_ext nbdist\n%dist_start 7 hosts"
    tab.save()
    tab.reload()
    expect(hosts).to_have_value("7")


def test_a_server_that_comes_back_is_followed_again(tab: Tab, jupyter: Jupyter) -> None:
    page = tab.page
    tab.begin(2)
    page.locator(f"{OUTPUT} canvas").first.wait_for()
    before = len(tab.sockets)
    jupyter.stop()
    jupyter.start()
    while len(tab.sockets) == before or tab.sockets[-1].is_closed():
        page.wait_for_timeout(100)
    expect(page.locator(OUTPUT, has_text="lost")).to_be_visible()


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_the_panel_can_be_read_by_everybody(tab: Tab, theme: str) -> None:
    page = tab.page
    tab.run(1)
    tab.begin(2)
    page.locator(f"{OUTPUT} canvas").first.wait_for()
    page.locator(".nbdist-Running").wait_for()
    tab.command("apputils:change-theme", theme=theme)
    tab.wait_for("theme => document.body.dataset.jpThemeName === theme", theme)
    assert tab.violations("#nbdist-panel") == []
    stop(tab)
