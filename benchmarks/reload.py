"""Page reload during a step cell on 2 engines: time until the chart appears, and until Stop works.

The peers are JupyterLab's own operations in the same rounds: the load until the first cell of the
notebook is visible, and the interrupt of a cell that sleeps.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.case import Case, Skipped
from tests.browser.lab import DRAWN, Lab, browser, chromium, run, start, wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

    from benchmarks.case import Scale

RUNS = 5
MOST_RELOAD_S, MOST_STOP_S = 3.0, 0.5
NAME = "reload.ipynb"
SETUP = """%%dist_run
import numpy as np, jax, jax.numpy as jnp
x = np.random.default_rng(0).normal(size=(4096, 16)).astype("float32")
data = (x, x @ np.arange(16, dtype="float32"))
w = jnp.zeros(16)
"""
STEPS = """%%dist_run --data data --batch 64 --epochs 1000000
xs, ys = batch
loss, g = jax.value_and_grad(lambda w: jnp.mean((xs @ w - ys) ** 2))(w)
w = w - 0.002 * g
"""
CELLS = [
    "%load_ext nbdist\n%dist_start 2 hosts --framework jax",
    SETUP,
    STEPS,
    "import time\nprint('begun')\ntime.sleep(600)",
]
START, SET_UP, RUN, SLEEP = range(4)
_CELL = "() => document.querySelector('.jp-CodeCell') !== null"
_TIMED = """index => new Promise(resolve => {
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[index].node;
  const began = performance.now();
  const look = () => IS_OVER ? resolve((performance.now() - began) / 1000)
                             : requestAnimationFrame(look);
  BEGIN;
  look();
})"""
_STOP = _TIMED.replace("BEGIN", "cell.querySelector('.nbdist-stop').click()").replace(
    "IS_OVER", "cell.querySelector('.nbdist-pill').textContent.includes('stopped')"
)
_INTERRUPT = _TIMED.replace(
    "BEGIN", "void window.jupyterapp.commands.execute('notebook:interrupt-kernel')"
).replace("IS_OVER", "!cell.querySelector('.jp-InputPrompt').textContent.includes('*')")


CHART = "page reload until the first chart is drawn, against JupyterLab until the first cell"
STOP = "click on Stop until the run is stopped, against JupyterLab's interrupt of a cell"


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    if chromium() is None:
        for name in (CHART, STOP):
            yield Skipped(name, "no Chromium on the path")
        return
    runs = scale.runs(RUNS)
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab, browser() as window:
        lab.write(NAME, CELLS)
        page = window.new_page()
        lab.open(page, NAME)
        run(page, START)
        run(page, SET_UP)
        rounds = [_round(lab, page) for _ in range(runs)]
    cell_s, chart_s, stop_s, interrupt_s = map(median, zip(*rounds, strict=True))
    for name, ours_s, peer_s, most_s in (
        (CHART, chart_s, cell_s, MOST_RELOAD_S),
        (STOP, stop_s, interrupt_s, MOST_STOP_S),
    ):
        target = round(most_s / peer_s, 3)
        yield Case(name, ours_s, peer_s, unit="s", target=target, runs=runs)


def _round(lab: Lab, page: Page) -> tuple[float, float, float, float]:
    """Return seconds to the first cell, to the chart, from Stop to its end, and of an interrupt."""
    start(page, RUN)
    _until_it_can_be_stopped(page)  # the previous run is drawn too
    page.wait_for_function(DRAWN)
    began = time.perf_counter()
    page.goto(lab.address(NAME), wait_until="commit")
    page.wait_for_function(_CELL)
    cell_s = time.perf_counter() - began
    page.wait_for_function(DRAWN)
    chart_s = time.perf_counter() - began
    return cell_s, chart_s, _stop_s(page), _interrupt_s(page)


def _until_it_can_be_stopped(page: Page) -> None:
    page.locator(".nbdist-run").get_by_role("button", name="Stop").wait_for()


def _stop_s(page: Page) -> float:
    _until_it_can_be_stopped(page)
    took: float = page.evaluate(_STOP, RUN)
    wait(page, RUN)
    return took


def _interrupt_s(page: Page) -> float:
    start(page, SLEEP)
    page.locator(".jp-Cell").nth(SLEEP).get_by_text("begun", exact=True).wait_for()
    took: float = page.evaluate(_INTERRUPT, SLEEP)
    return took
