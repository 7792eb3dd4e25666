"""Run of real engines in a real JupyterLab, in the page that started it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser.lab import (
    PIXELS,
    change_theme,
    open_panel,
    run,
    sources,
    start,
    until,
    view,
    violations,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Locator, Page

    from tests.browser.lab import Lab

SETUP = """%%dist_run
import numpy as np, jax, jax.numpy as jnp
x = np.random.default_rng(0).normal(size=(4096, 16)).astype("float32")
data = (x, x @ np.arange(16, dtype="float32"))
long = tuple(np.concatenate([part] * 64) for part in data)  # few epochs, and so few lines
w = jnp.zeros(16)
"""
STEP = """%%dist_run --data {data} --batch 64 --epochs {epochs} -o kept
xs, ys = batch
loss, g = jax.value_and_grad(lambda w: jnp.mean((xs @ w - ys) ** 2))(w)
w = w - 0.002 * g
{{'loss': loss, 'size': jnp.sum(w * w)}}
"""
TRUSTED = "i => window.jupyterapp.shell.currentWidget.content.widgets[i].model.trusted"
_ERROR_FOCUSED = "() => document.activeElement.dataset.mimeType?.endsWith('jupyter.stderr')"
# A headless browser neither hides a page nor shows its notifications: both are doubles.
_HIDE = """() => {
  Object.defineProperty(document, 'hidden', {configurable: true, get: () => true});
  window.shownNotifications = [];
  const Real = window.Notification;
  window.Notification = class extends Real {
    constructor(title, options) {
      super(title, options);
      window.shownNotifications.push(this);
    }
  };
}"""
START, SET_UP, ENDLESS, SHORT, AFTER, FAILS = range(1, 7)
CELLS = [
    "# Below this one, the panel puts the cell that starts the cluster.",
    SETUP,
    STEP.format(data="long", epochs=1000),
    STEP.format(data="data", epochs=3),
    "print(len(kept.loss), kept.last('size') > 0)",
    """%%dist_run
report(step=1, loss=2.0)
raise ValueError("in user code:\\n\\n    File 'f'\\n\\n    ValueError: no number")
""",
]


@pytest.fixture(scope="module")
def notebook(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """Provide a notebook with data on two workers, which the panel started."""
    lab.write("run.ipynb", CELLS)
    page = window.new_page()
    lab.open(page, "run.ipynb")
    form = open_panel(page).get_by_role("form", name="Start cluster")
    form.get_by_label("Hosts").fill("2")
    form.get_by_label("Framework").select_option(label="JAX")
    form.get_by_role("button", name="Start cluster").click()
    page.get_by_text("nbdist: 2 workers are ready").wait_for()
    run(page, SET_UP)
    yield page
    page.close()


@pytest.fixture(autouse=True)
def interrupt_remaining_run(notebook: Page) -> Iterator[None]:
    """Interrupt the run of a failed test before the next test."""
    yield
    if is_busy(notebook):
        notebook.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")


def figure(view: Locator, name: str) -> Locator:
    return view.locator(".nbdist-figure", has=view.page.get_by_text(name, exact=True)).locator("dd")


def status(view: Locator) -> str:
    return view.locator(".nbdist-pill").inner_text()


def start_endless_run(page: Page) -> Locator:
    """Start an endless run and return its view after the first steps."""
    start(page, ENDLESS)
    shown = view(page, ENDLESS)
    figure(shown, "loss (last step)").wait_for()
    return shown


def stop(page: Page, shown: Locator) -> None:
    shown.get_by_role("button", name="Stop run").click()
    shown.locator(".nbdist-pill", has_text="stopped").wait_for()
    wait(page, ENDLESS)


def is_busy(page: Page) -> bool:
    busy: bool = page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status==='busy'"
    )
    return busy


def wait_for_redraw(page: Page, canvas: Locator) -> None:
    """Wait until a chart shows other pixels than now."""
    before = canvas.evaluate(PIXELS)

    def is_other() -> bool:
        canvas.evaluate("element => element.scrollIntoView({block: 'center'})")
        return bool(canvas.evaluate(PIXELS) != before)  # a chart is drawn only while it is visible

    until(page, is_other)


@pytest.mark.full  # tests/telemetry/test_run_state.py tests the figures
def test_planned_values_are_shown_beside_measured_ones(notebook: Page, pictures: Path) -> None:
    shown = start_endless_run(notebook)
    table = shown.get_by_role("table", name="Planned and measured")
    measured = table.get_by_role("row", name="measured").get_by_role("cell")
    until(notebook, lambda: "\u2013" not in measured.all_inner_texts())
    planned = table.get_by_role("row", name="planned").get_by_role("cell")
    assert planned.nth(2).inner_text() == measured.nth(2).inner_text()  # arguments are exact
    shown.screenshot(path=pictures / "planned.png")
    stop(notebook, shown)


def test_chart_updates_while_the_cell_runs_and_stop_ends_the_run(notebook: Page) -> None:
    shown = start_endless_run(notebook)
    chart = shown.get_by_role("img").first
    chart.scroll_into_view_if_needed()
    wait_for_redraw(notebook, chart.locator("canvas").first)
    words = chart.get_attribute("aria-label") or ""
    assert re.match(r"Chart of loss.*, from step 1 to step [\d,]+. Latest: \d", words)
    assert is_busy(notebook)
    assert "running" in status(shown)
    shown.locator("table", has_text="ms/step").locator("tbody tr").nth(1).wait_for()
    stop(notebook, shown)
    assert not notebook.locator(".jp-OutputArea-output[data-mime-type*=error]").count()
    assert re.match(r"\d+ True", run(notebook, AFTER)), "the run is stored and the state is kept"
    run(notebook, SHORT)
    view(
        notebook, SHORT
    ).scroll_into_view_if_needed()  # a chart outside the visible area is not drawn
    view(notebook, SHORT).locator(".nbdist-pill", has_text="finished").wait_for()


def test_toolbar_and_panel_show_the_run_and_stop_it(notebook: Page) -> None:
    shown = start_endless_run(notebook)
    notebook.get_by_role("button", name="nbdist: 2 workers").click()
    panel = notebook.get_by_role("region", name="nbdist clusters and runs")
    panel.get_by_text("running", exact=True).wait_for()
    assert panel.get_by_role("table").locator("tbody tr").count() == 2
    notebook.locator(".jp-NotebookPanel-toolbar").get_by_text("Stop run").click()
    shown.locator(".nbdist-pill", has_text="stopped").wait_for()
    wait(notebook, ENDLESS)
    panel.get_by_text("stopped", exact=True).first.wait_for()


@pytest.mark.full
def test_a_second_page_shows_the_same_run(lab: Lab, window: BrowserContext, notebook: Page) -> None:
    shown = start_endless_run(notebook)
    second = window.new_page()
    lab.show(second, waits_for="#jp-main-dock-panel")
    second.wait_for_function(
        "() => window.jupyterapp?.commands.isEnabled('nbdist:open-latest-run')"
    )
    second.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-latest-run')")
    other = second.locator(".nbdist-RunTab .nbdist-run")
    wait_for_redraw(second, other.locator("canvas").first)
    other.get_by_role("button", name="Stop").click()
    shown.locator(".nbdist-pill", has_text="stopped").wait_for()
    assert other.locator(".nbdist-pill", has_text="stopped").count()
    second.close()
    wait(notebook, ENDLESS)


def test_the_panel_starts_a_cluster_by_a_visible_cell(notebook: Page) -> None:
    assert sources(notebook)[START] == "%load_ext nbdist\n%dist_start 2 hosts --framework jax"
    open_panel(notebook).get_by_role("region", name="2 workers · JAX").wait_for()


@pytest.mark.full
def test_the_panel_starts_a_cluster_of_one_and_stops_it(lab: Lab, page: Page) -> None:
    lab.write("panel.ipynb", ["%load_ext nbdist"])
    lab.open(page, "panel.ipynb")
    run(page, 0)
    panel = open_panel(page)
    form = panel.get_by_role("form", name="Start cluster")
    form.get_by_label("Hosts").fill("1")
    form.get_by_label("Framework").select_option(label="JAX")
    form.get_by_role("button", name="Start cluster").click()
    page.get_by_text("nbdist: 1 worker is ready").wait_for()
    cluster = panel.get_by_role("region", name="1 worker · JAX")
    cluster.get_by_role("button", name="Stop cluster").click()
    cluster.wait_for(state="detached")
    assert "%dist_start 1 host --framework jax" in sources(page)[1]
    assert "%dist_stop" in sources(page)[2]


def test_an_error_is_shown_in_full_only_in_the_output_of_its_cell(
    notebook: Page, pictures: Path
) -> None:
    output = run(notebook, FAILS)
    assert output.count("\n    ValueError: no number") == 1
    assert "raised on rank" in output
    shown = view(notebook, FAILS)
    shown.scroll_into_view_if_needed()  # a view outside the visible area is not drawn
    shown.get_by_text(re.compile(r"^ValueError on rank \d@\S+: no number$")).wait_for()
    states = shown.locator("td.nbdist-state").all_inner_texts()
    assert all(state.endswith("failed: ValueError: no number") for state in states)
    assert "in user code" not in shown.inner_text()
    panel = open_panel(notebook).locator(".nbdist-Runs .nbdist-Error").first
    panel.get_by_text(re.compile(r"^ValueError on rank \d@\S+: no number$")).wait_for()
    notebook.screenshot(path=pictures / "error.png")
    assert violations(notebook, ".nbdist-run") == []
    shown.get_by_role("button", name="Show the error").click()
    notebook.wait_for_function(_ERROR_FOCUSED)
    notebook.evaluate("() => document.activeElement.blur()")
    notebook.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-latest-run')")
    in_tab = notebook.locator(".nbdist-RunTab .nbdist-run")
    in_tab.get_by_role("button", name="Show the error").click()
    notebook.wait_for_function(_ERROR_FOCUSED)
    notebook.locator(".lm-DockPanel-tabBar .lm-TabBar-tab", has_text="Cell").first.locator(
        ".lm-TabBar-tabCloseIcon"
    ).click()


def test_title_and_notifications_show_the_end_of_runs_in_a_hidden_page(notebook: Page) -> None:
    context = notebook.context
    context.grant_permissions(["notifications"])
    notebook.evaluate(_HIDE)
    toggle = open_panel(notebook).get_by_label("Notify when runs end")
    toggle.click()
    until(notebook, toggle.is_checked)
    start(notebook, ENDLESS)
    until(notebook, lambda: bool(re.match(r"\d+ % · run", notebook.title())), notebook.title)
    notebook.evaluate("() => window.jupyterapp.commands.execute('nbdist:stop-run')")
    wait(notebook, ENDLESS)
    until(notebook, lambda: notebook.title().startswith("run"), notebook.title)
    run(notebook, FAILS)
    until(notebook, lambda: notebook.title().startswith("✕ · run"), notebook.title)
    titles = notebook.evaluate("() => shownNotifications.map(({title}) => title)")
    bodies = notebook.evaluate("() => shownNotifications.map(({body}) => body)")
    assert re.fullmatch(r"Cell \d+, .*: failed", titles[-1]), titles
    assert re.search(r"· ValueError on rank \d@\S+: no number$", bodies[-1]), bodies
    notebook.evaluate("() => document.activeElement.blur()")
    notebook.evaluate("() => shownNotifications.at(-1).onclick()")
    notebook.wait_for_function(_ERROR_FOCUSED)
    notebook.evaluate("() => { delete document.hidden; window.dispatchEvent(new Event('focus')); }")
    until(notebook, lambda: notebook.title().startswith("run"), notebook.title)
    toggle.click()
    until(notebook, lambda: not toggle.is_checked())


@pytest.mark.full  # the next test and test_panel.py find violations
def test_run_view_and_panel_have_no_accessibility_violations(notebook: Page) -> None:
    run(notebook, SHORT)
    view(notebook, SHORT).scroll_into_view_if_needed()
    assert violations(notebook, ".nbdist-run") == []
    open_panel(notebook)
    assert violations(notebook, ".nbdist-Panel") == []


@pytest.mark.parametrize(
    ("theme", "direction"),
    [
        ("JupyterLab Dark", "rtl"),
        pytest.param("JupyterLab Light", "rtl", marks=pytest.mark.full),
        pytest.param("JupyterLab Light", "ltr", marks=pytest.mark.full),
        pytest.param("JupyterLab Dark", "ltr", marks=pytest.mark.full),
    ],
)
def test_run_view_follows_theme_and_direction(
    notebook: Page, theme: str, direction: str, pictures: Path
) -> None:
    """Save screenshots for review."""
    run(notebook, SHORT)
    change_theme(notebook, theme)
    notebook.evaluate("direction => { document.documentElement.dir = direction; }", direction)
    shown = view(notebook, SHORT)
    shown.scroll_into_view_if_needed()
    shown.screenshot(path=pictures / f"run-{theme.split()[1].lower()}-{direction}.png")
    heading, button = shown.locator(".nbdist-title"), shown.locator(".nbdist-about")
    boxes = heading.bounding_box(), button.bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert (boxes[0]["x"] < boxes[1]["x"]) == (direction == "ltr")
    ink, paper = shown.evaluate(
        """element => [getComputedStyle(element).color,
                       getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor]"""
    )
    assert brightness(ink) > brightness(paper) + 80 or brightness(paper) > brightness(ink) + 80
    assert violations(notebook, ".nbdist-run") == []
    notebook.evaluate("() => { document.documentElement.dir = 'ltr'; }")


def brightness(colour: str) -> float:
    """Return the mean brightness of a colour `rgb(…)`, from 0 to 255."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.fixture(scope="module")
def saved(lab: Lab, notebook: Page) -> Path:
    """Save the notebook with a finished run and return its path."""
    run(notebook, SHORT)
    notebook.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    notebook.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    return lab.server.home / "run.ipynb"


def test_a_saved_notebook_contains_a_picture_and_a_text(saved: Path) -> None:
    outputs = nbformat.read(saved, as_version=4).cells[SHORT].outputs
    (data,) = [o.data for o in outputs if "<img" in o.get("data", {}).get("text/html", "")]
    assert "step 192 of 192" in data["text/plain"]
    assert set(data) == {"application/vnd.nbdist.run.v1+json", "text/html", "text/plain"}
    assert len(data["text/html"]) < 26_000


@pytest.mark.parametrize("trusted", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.full
def test_a_saved_notebook_shows_the_picture_of_a_missing_run(
    lab: Lab, saved: Path, page: Page, trusted: bool
) -> None:
    name = f"reopened-{trusted}.ipynb"
    read = nbformat.read(saved, as_version=4)
    read.metadata.title = name  # a signature depends on the content and not on the file's name
    for output in read.cells[SHORT].outputs:
        if "data" in output:
            output.data["application/vnd.nbdist.run.v1+json"]["id"] = "20010101-000000-abcdef"
    nbformat.write(read, lab.server.home / name)
    if trusted:
        lab.trust(name)
    lab.show(page, name)
    assert page.evaluate(TRUSTED, SHORT) == trusted
    picture = page.locator(".jp-Cell").nth(SHORT).locator("img[src^='data:image/png']")
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("image => image.naturalWidth") > 600


def test_the_exported_page_shows_the_picture_offline(
    saved: Path, window: BrowserContext, tmp_path: Path
) -> None:
    html, _ = HTMLExporter().from_filename(str(saved))
    (tmp_path / "run.html").write_text(html)
    assert window.browser is not None
    with window.browser.new_context(offline=True) as alone:
        page = alone.new_page()
        page.goto((tmp_path / "run.html").as_uri(), wait_until="domcontentloaded")
        widths = page.locator("img[src^='data:image/png']").evaluate_all(
            "images => images.map(image => image.naturalWidth)"
        )
    assert widths
    assert min(widths) > 600


def test_the_panel_stops_the_cluster_by_a_cell(notebook: Page) -> None:
    """Stop the module's cluster: this test must be the last."""
    cluster = open_panel(notebook).get_by_role("region", name="2 workers · JAX")
    cluster.get_by_role("button", name="Stop cluster").click()
    cluster.wait_for(state="detached")
    assert "%dist_stop" in sources(notebook)
