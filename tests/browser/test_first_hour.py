"""First hour of a user: one notebook with TensorFlow on two workers, from the start to the stop.

Each test reads what JupyterLab shows, or what the saved notebook contains. Tests of other folders
cover the same messages without a browser.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.lab import TIMEOUT_MS, activate, keep, open_panel, run, start, view, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Page

    from tests.browser.lab import Lab

pytestmark = pytest.mark.full

SETUP = """%%dist_run
import time
import keras, numpy as np
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
"""
FIT = "model.fit(x, y, batch_size=16, epochs={epochs}, verbose=0);"
LATE = """%%dist_run
for epoch in range(1, 4):
    time.sleep(0.6 * rank)
    report(epoch=epoch, loss=1.0 / epoch)
"""
WORDS, START, SET_UP, FIRST, ENDLESS, LATE_RANK, PRINTS, LACKS, DATA, OPTION = range(10)
HELP, PUSH, PULL, HOSTS, SHOW, RESIZE, STOP = range(10, 17)
CELLS = [
    "rate = 0.125\n%load_ext nbdist\n%dist_start 2 boxes",
    "%dist_start 2 workers --framework tensorflow",
    SETUP,
    f"%%dist_run --name 'first fit' -o first\n{FIT.format(epochs=1)}",
    f"%%dist_run\n{FIT.format(epochs=100_000)}",
    LATE,
    "%%dist_run\nfor i in range(20_000):\n    print('line', i)",
    "%%dist_run\nprint(rate)",
    f"%%dist_run --data x --batch 16\n{FIT.format(epochs=1)}",
    f"%%dist_run --naem other\n{FIT.format(epochs=1)}",
    "%dist_start --help",
    "%dist_push rate",
    "x = 'of the notebook'\n%dist_pull x",
    "%dist_hosts",
    "%dist_show model",
    "%dist_resize 1 host",
    "%dist_stop",
]


@pytest.fixture(scope="module")
def notebook(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    """Provide the notebook with its cluster and a model."""
    expect.set_options(timeout=TIMEOUT_MS)
    lab.write("hour.ipynb", CELLS)
    page = window.new_page()
    lab.open(page, "hour.ipynb")
    assert "'2 boxes' is neither a number of hosts nor their names" in run(page, WORDS)
    assert "2 workers are ready" in run(page, START)
    assert "Error" not in run(page, SET_UP)
    yield page
    page.close()


def saved(lab: Lab, page: Page, index: int) -> list[Any]:
    """Save the notebook, and return the outputs of a cell in its file."""
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    outputs: list[Any] = nbformat.read(lab.server.home / "hour.ipynb", 4).cells[index].outputs
    return outputs


def test_a_fit_of_one_epoch_leaves_its_curve_by_step_and_its_end(lab: Lab, notebook: Page) -> None:
    run(notebook, FIRST)
    (data,) = [o.data for o in saved(lab, notebook, FIRST) if "text/html" in o.get("data", {})]
    assert re.search(r'alt="Chart of loss [^"]*of 2 ranks, step 1 to 16, ', data["text/html"])
    assert len(data["text/html"]) < 26_000
    text = data["text/plain"]
    assert text.startswith("<nbdist run first fit (")
    for part in ("finished in", "2 workers", "epoch 1 of 1", "step 16 of 16", "loss"):
        assert part in text
    shown = view(notebook, FIRST)
    expect(shown.locator(".nbdist-title")).to_have_text("first fit")
    elapsed = re.search(r"finished in ([\d.]+ \w+)", text)
    assert elapsed is not None
    assert elapsed[1] in notebook.locator(".jp-Notebook .jp-Cell").nth(FIRST).inner_text()


def test_an_interrupt_of_a_fit_prints_where_it_stopped(notebook: Page) -> None:
    notebook.locator(".jp-Notebook .jp-Cell").nth(ENDLESS).scroll_into_view_if_needed()
    start(notebook, ENDLESS)
    figures = view(notebook, ENDLESS).locator(".nbdist-figures")
    expect(figures).to_contain_text("2 of 100,000")  # the second epoch
    notebook.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    text = wait(notebook, ENDLESS)
    assert re.search(
        r"KeyboardInterrupt: stopped after step \d+; the workers keep their variables", text
    )
    assert "Traceback" not in text
    assert "keras/src" not in text


def test_epoch_lines_wait_for_the_late_rank(notebook: Page) -> None:
    lines = run(notebook, LATE_RANK).splitlines()
    epochs = [line.split()[1] for line in lines if re.match(r"epoch \d+  ", line)]
    assert epochs == ["1", "2", "3"]


def test_long_output_is_cut_in_the_saved_notebook(lab: Lab, notebook: Page) -> None:
    run(notebook, PRINTS)
    text = str(saved(lab, notebook, PRINTS))
    assert "run %dist_logs" in text
    assert len(text) < 60_000


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (LACKS, "only the notebook has `rate` (float): run %dist_push rate"),
        (DATA, "`model.fit` reads its own data: remove --data and --batch"),
        (OPTION, "did you mean --name?"),
        (HELP, "%dist_start: Start one worker on each host"),
        (PUSH, "copied `rate` to 2 workers"),
        (PULL, "the notebook has another `x`: choose a name with -o NAME"),
    ],
    ids=["name of the notebook", "data of a fit", "mistyped option", "help", "push", "pull"],
)
def test_messages_contain_the_remedy(notebook: Page, index: int, expected: str) -> None:
    assert expected in run(notebook, index)


def test_a_host_has_one_line(notebook: Page) -> None:
    lines = run(notebook, HOSTS).splitlines()
    assert [line.partition("\t")[0] for line in lines] == [
        "nbdist: 2 workers on 1 host",
        "rank",
        "0-1",
    ]


def test_the_placement_is_stale_after_a_resize(notebook: Page, pictures: Path) -> None:
    run(notebook, SHOW)
    keep(notebook)
    open_panel(notebook).get_by_role("button", name="Show array placement").click()
    tab = notebook.get_by_role("region", name="Array placement")
    expect(tab).to_contain_text("Output of %dist_show model at")
    activate(notebook)
    assert "1 worker is ready" in run(notebook, RESIZE)
    notebook.get_by_role("tab", name="Array placement").click()
    expect(tab.get_by_role("status")).to_contain_text("Stale: the workers were replaced.")
    notebook.screenshot(path=pictures / "first-hour.png")
    activate(notebook)


def test_stop_names_the_ended_workers(notebook: Page) -> None:
    assert re.search(r"ended \d workers? on 1 host", run(notebook, STOP))
