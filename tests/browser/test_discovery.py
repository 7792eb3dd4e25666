"""Launcher, menus, palette and the panel without a notebook, in a real JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from nbdist.server.documents import EXAMPLES
from tests.browser.lab import TIMEOUT_MS, Lab, change_theme, run, sources, until, violations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LABELS = """() => [...document.querySelectorAll('.lm-CommandPalette-item')]
  .filter(item => item.dataset.command.startsWith('nbdist:'))
  .map(item => item.querySelector('.lm-CommandPalette-itemLabel').textContent)"""


@pytest.fixture(autouse=True, scope="module")
def set_timeout() -> None:
    expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture
def tab(lab: Lab, page: Page) -> Iterator[Page]:
    """Open a JupyterLab that shows the launcher."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    lab.show(page, waits_for=".jp-LauncherCard")
    yield page
    lab.end_kernels()
    assert not errors


def menu(page: Page, name: str) -> list[str]:
    """Open a menu and return the labels of the entries of nbdist."""
    page.get_by_role("menubar").first.get_by_text(name, exact=True).click()
    entries = page.locator(".lm-Menu-item[data-command^='nbdist:'] .lm-Menu-itemLabel")
    entries.first.wait_for()
    labels = entries.all_inner_texts()
    page.keyboard.press("Escape")
    return labels


def palette(page: Page) -> list[str]:
    """Open the command palette if it is closed, and return its entries of nbdist.

    JupyterLab closes the palette when a notebook that has just opened takes the focus.
    """
    if not page.locator("#modal-command-palette").is_visible():
        page.evaluate(
            "() => window.jupyterapp.commands.execute('apputils:activate-command-palette')"
        )
    labels: list[str] = page.evaluate(_LABELS)
    return labels


def test_menus_name_the_product_and_the_launcher_opens_an_example(
    tab: Page, pictures: Path
) -> None:
    assert menu(tab, "Run") == [
        "nbdist: Start cluster",
        "nbdist: Stop cluster",
        "nbdist: Stop run",
        "nbdist: Open runs",
        "nbdist: Insert snippet",
        "nbdist: Notify when runs end",
    ]
    assert menu(tab, "Help") == ["nbdist: Open example notebook", "nbdist: Open documentation"]
    card = tab.locator(".jp-LauncherCard", has_text="Distributed training")
    card.wait_for()
    tab.screenshot(path=pictures / "launcher.png")
    card.click()
    dialog = tab.get_by_role("dialog")
    dialog.get_by_role("combobox").select_option(label="JAX")
    tab.screenshot(path=pictures / "framework.png")
    dialog.get_by_role("button", name="Open").click()
    tab.get_by_role("tab", name="nbdist JAX.ipynb").wait_for()
    until(tab, lambda: "%%dist_run --strategy pjrt" in "".join(sources(tab)))
    assert "--framework jax" in (EXAMPLES / "jax.ipynb").read_text()
    tab.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    tab.screenshot(path=pictures / "example.png")
    labels: list[str] = []
    until(tab, lambda: bool(labels.extend(palette(tab)) or labels))
    assert "nbdist: Open latest run" in labels
    assert [label for label in labels if not label.startswith("nbdist: ")] == []


def test_the_panel_starts_a_cluster_in_a_new_notebook_and_opens_the_documents(
    tab: Page, pictures: Path, themes: Sequence[str]
) -> None:
    tab.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-panel')")
    panel = tab.get_by_role("region", name="nbdist clusters and runs")
    panel.get_by_role("heading", name="nbdist", exact=True).wait_for()
    snippet = panel.get_by_role("button", name="Cell that stops the cluster")
    assert snippet.get_attribute("title") == "Open a notebook first"
    for theme in themes:
        change_theme(tab, theme)
        assert violations(tab, "#nbdist-panel") == []
        tab.screenshot(path=pictures / f"panel-{theme.split()[1].lower()}.png")
    with tab.context.expect_page() as opened:
        panel.get_by_role("button", name="Documentation").click()
    opened.value.get_by_role("heading", name="nbdist").first.wait_for()
    shown = opened.value.locator("img").first
    until(opened.value, lambda: shown.evaluate("image => image.naturalWidth") > 100)
    opened.value.screenshot(path=pictures / "documents.png")
    opened.value.get_by_role("link", name="strategies", exact=True).first.click()
    opened.value.get_by_role("heading", name="Strategies").first.wait_for()
    opened.value.close()
    form = panel.get_by_role("form", name="Start cluster")
    form.get_by_label("Hosts").fill("1")
    form.get_by_label("Framework").select_option(label="JAX")
    form.get_by_role("button", name="Start cluster").click()
    tab.get_by_text("nbdist: 1 worker is ready").wait_for()
    assert sources(tab)[0] == "%load_ext nbdist\n%dist_start 1 host --framework jax"
    panel.get_by_role("button", name="Stop cluster").click()
    panel.get_by_role("region", name="1 worker · JAX").wait_for(state="detached")


@pytest.mark.full  # tests/magics/test_dist.py tests the descriptions
def test_descriptions_of_options_are_on_one_line(lab: Lab, tab: Page, pictures: Path) -> None:
    lab.write("options.ipynb", ["%load_ext nbdist", "%dist_start --"])
    lab.open(tab, "options.ipynb")
    run(tab, 0)
    tab.locator(".jp-Notebook .jp-Cell").nth(1).locator(".cm-content").click()
    tab.keyboard.press("End")
    tab.keyboard.press("Tab")
    option = tab.locator(".jp-Completer-item", has_text="--framework")
    description = option.locator(".jp-Completer-typeExtended")
    description.get_by_text("frameworks that the workers load", exact=False).wait_for()
    tab.screenshot(path=pictures / "completer.png")
    box = description.bounding_box()
    name = option.locator(".jp-Completer-match").bounding_box()
    assert box is not None
    assert name is not None
    assert box["height"] < 1.5 * name["height"]
    assert box["x"] >= name["x"] + name["width"]
