"""JupyterLab tells the kernel which cells the user has deleted, and the export refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import Lab, run

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

NAME = "deleted.ipynb"
CELLS = [
    "%load_ext nbdist\n%dist_start 1 host --framework jax",
    "%%dist_run\ndef loss_of(w, x): return ((w - x) ** 2).mean()",
    "%%dist_run\nimport jax.numpy as jnp\ntrain, w = jnp.arange(8.0), jnp.zeros(())",
    "%%dist_run --data train --batch 4\nw = w - 0.1 * batch.mean()\nloss = loss_of(w, batch)",
    "1 + 1",
    "%dist_export train/",
]
_DELETE = """async index => {
  const panel = window.jupyterapp.shell.currentWidget;
  panel.content.activeCellIndex = index;
  panel.content.deselectAll();
  await window.jupyterapp.commands.execute('notebook:delete-cell');
}"""


@pytest.mark.full
def test_export_refuses_a_cell_that_the_page_has_deleted(lab: Lab, window: BrowserContext) -> None:
    lab.write(NAME, CELLS)
    page = window.new_page()
    lab.open(page, NAME)
    for index in range(4):
        run(page, index)
    page.evaluate(_DELETE, 1)
    run(page, 3)  # another cell receives the id
    text = run(page, 4)
    assert "cannot export cell [4]: `loss_of` comes from cell [2], which was deleted" in text
    assert not (lab.server.home / "train").exists()
    page.close()
