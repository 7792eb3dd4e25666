"""Tab with the placement of arrays, in a real JupyterLab with real engines.

The test in Notebook 7 uses the files of a cluster without engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.browser.lab import (
    TIMEOUT_MS,
    Lab,
    activate,
    change_theme,
    keep,
    open_panel,
    run,
    violations,
)
from tests.server.jupyter import BASE, TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Locator, Page

SETUP = """%%dist_run
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ('data',))
def place(shape, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(shape, sharding, lambda i: np.ones(shape)[i])
params = {
    f'layer_{i}': {'kernel': place((512, 256), 'data'), 'bias': place((256,))} for i in range(24)
}
scale = place((64, 64), None, 'data')
"""
INJECTION = """
from pathlib import Path
from jupyter_core.paths import jupyter_runtime_dir
from nbdist.telemetry.cluster_file import ClusterFile
from nbdist.utils.files import LateFiles

folder = Path(jupyter_runtime_dir()) / "nbdist" / "0123456789ab"
folder.mkdir(parents=True)
files = LateFiles()
file = ClusterFile(folder, ("jax",), files)
file.write((), run="")
evil = "<script>window.evil = 1</script><img src='x' onerror='window.evil = 1'>"
file.show(("params",), f"<details open><summary>params</summary>{evil}kernel</details>")
files.close()
"""
START, SET_UP, SHOW, RESTART = range(4)
CELLS = [
    "%load_ext nbdist\n%dist_start 2 hosts --framework jax",
    SETUP,
    "%dist_show params",
    "%dist_restart",
]
CLOSE_TAB = """() => {
  const own = '.nbdist-PlacementTab';
  const tabs = [...window.jupyterapp.shell.widgets('main')];
  tabs.find(({ node }) => node.matches(own) || node.querySelector(own)).close();
}"""
COUNT = "() => window.notebook.content.widgets.length"


@pytest.fixture(scope="module")
def notebook(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """Provide a notebook whose two workers contain arrays that no cell has shown yet."""
    expect.set_options(timeout=TIMEOUT_MS)
    lab.write("arrays.ipynb", CELLS)
    page = window.new_page()
    lab.open(page, "arrays.ipynb")
    assert "2 workers are ready" in run(page, START)
    assert "Error" not in run(page, SET_UP)
    keep(page)
    yield page
    page.close()


@pytest.fixture(scope="module")
def tab(notebook: Page) -> Locator:
    """Open the tab from the panel and place it beside its notebook."""
    open_panel(notebook).get_by_role("button", name="Show array placement").click()
    tab = notebook.get_by_role("region", name="Array placement")
    expect(tab).to_contain_text("No placement yet")
    notebook.evaluate(
        """() => {
             const { shell } = window.jupyterapp;
             shell.add(shell.currentWidget, 'main', { mode: 'split-bottom' });
             shell.activateById(window.notebook.id);
           }"""
    )
    return tab


def test_tab_shows_the_output_of_the_magic_and_folds(notebook: Page, tab: Locator) -> None:
    assert "48 arrays" in run(notebook, SHOW)
    expect(tab).to_contain_text("Output of %dist_show params at")
    names, layer = tab.locator("summary", has_text="params"), tab.locator("summary").nth(1)
    expect(names).to_contain_text("48 arrays")
    expect(layer).to_contain_text("layer_0")
    kernel = tab.get_by_text("['kernel']").first
    expect(kernel).to_be_hidden()
    layer.click()
    expect(kernel).to_be_visible()
    names.click()
    expect(layer).to_be_hidden()
    names.click()
    expect(tab.locator("[title*='0:256']").first).to_be_visible()


def test_the_form_adds_a_cell_to_the_notebook(notebook: Page, tab: Locator) -> None:
    form = tab.get_by_role("form", name="Show array placement")
    field = form.get_by_label("Names on the workers")
    expect(field).to_have_value("params")
    before = notebook.evaluate(COUNT)
    field.fill("   ")
    form.get_by_role("button", name="Show").click()
    assert notebook.evaluate(COUNT) == before  # an invalid form does nothing
    field.fill(" scale  params ")
    form.get_by_role("button", name="Show").click()
    expect(tab).to_contain_text("Output of %dist_show scale params at")
    expect(tab).to_contain_text("P(None, 'data')")
    assert notebook.evaluate(COUNT) == before + 1


@pytest.mark.full  # the next test finds violations in the tab, test_panel.py in the panel
def test_tab_and_panel_have_no_accessibility_violations(
    notebook: Page, tab: Locator, pictures: Path
) -> None:
    """Save screenshots for review."""
    tab.locator("summary", has_text="layer_0").click()
    notebook.screenshot(path=pictures / "placement-tab.png")
    tab.screenshot(path=pictures / "placement-light.png")
    assert violations(notebook, ".nbdist-PlacementTab") == []
    assert violations(notebook, ".nbdist-Panel") == []
    change_theme(notebook, "JupyterLab Dark")
    tab.screenshot(path=pictures / "placement-dark.png")
    assert violations(notebook, ".nbdist-PlacementTab") == []


def test_a_restart_makes_the_tab_stale_until_a_refresh(
    notebook: Page, tab: Locator, pictures: Path
) -> None:
    stale = tab.get_by_role("status")
    expect(stale).to_have_count(0)
    activate(notebook)
    run(notebook, RESTART + 1)  # the form has added a cell
    expect(stale).to_contain_text("Stale: the workers were replaced.")
    tab.screenshot(path=pictures / "placement-stale.png")
    assert violations(notebook, ".nbdist-PlacementTab") == []
    stale.get_by_role("button", name="Refresh").click()  # the arrays do not exist yet
    expect(tab.get_by_role("alert")).to_contain_text("The arrays cannot be shown")
    activate(notebook)
    assert "Error" not in run(notebook, SET_UP)
    stale.get_by_role("button", name="Refresh").click()
    expect(stale).to_have_count(0)
    expect(tab.get_by_role("alert")).to_have_count(0)


def test_tab_reports_a_closed_notebook_and_survives_a_reload(
    lab: Lab, notebook: Page, tab: Locator
) -> None:
    notebook.evaluate("() => window.notebook.context.save().then(() => window.notebook.close())")
    expect(tab).to_contain_text("Open the notebook of the cluster to run %dist_show.")
    expect(tab.get_by_role("button", name="Show")).to_be_disabled()
    notebook.goto(f"http://{lab.server.at}/{BASE}/lab?token={TOKEN}")
    expect(tab).to_contain_text("Output of %dist_show scale params at")
    expect(tab).to_contain_text("layer_23")


def test_tab_reports_a_missing_cluster(lab: Lab, notebook: Page, tab: Locator) -> None:
    """Stop the module's cluster: this test must be the last."""
    lab.end_kernels()
    expect(tab).to_contain_text("The cluster is not available")
    expect(tab).to_contain_text("layer_23")
    notebook.evaluate(CLOSE_TAB)
    expect(tab).to_have_count(0)


@pytest.mark.full  # tests/server/test_handlers.py tests that no script runs
def test_notebook_7_shows_the_tab_and_runs_no_script_in_it(lab: Lab, page: Page) -> None:
    lab.write("evil.ipynb", [INJECTION])
    lab.as_notebook().open(page, "evil.ipynb")
    run(page, 0)
    page.wait_for_function("() => window.jupyterapp.commands.isEnabled('nbdist:open-placement')")
    page.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-placement')")
    tab = page.get_by_role("region", name="Array placement")
    expect(tab.locator("details")).to_contain_text("kernel")
    assert tab.locator("script, [onerror]").count() == 0
    assert page.evaluate("() => window.evil") is None
