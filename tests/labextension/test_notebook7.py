"""The extension in a real Notebook 7, which has no status bar and one place for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.labextension.browser import Jupyter, Tab, pages

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    yield from pages()


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    with Jupyter(tmp_path_factory.mktemp("notebook"), "notebook") as server:
        yield server


def test_a_run_is_shown_and_stopped(jupyter: Jupyter, context: Any) -> None:
    jupyter.write("run.ipynb", ["import synthetic", "kept = synthetic.run(60)"])
    tab = Tab(context.new_page(), jupyter)
    tab.open("run.ipynb")
    tab.run(0)
    tab.begin(1)
    output = tab.page.locator(".nbdist-RunOutput")
    output.locator("canvas").first.wait_for()
    tab.command("nbdist:open-panel")
    panel = tab.page.get_by_role("region", name="nbdist clusters and runs")
    panel.locator("[data-status=running]").wait_for()
    tab.command("nbdist:open-latest-run")
    tab.page.locator(".nbdist-RunTab canvas").first.wait_for()
    panel.get_by_role("button", name="Stop the run").click()
    expect(output).to_contain_text("stopped")
    tab.page.close()
