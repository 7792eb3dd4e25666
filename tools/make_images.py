"""Make the images of the documentation in a real JupyterLab: `python -m tools.make_images`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.lab import Lab, browser, run, start, wait

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SETUP = """%%dist_run
import numpy as np, tensorflow as tf, keras, time
rng = np.random.default_rng(0)
x = rng.normal(size=(8192, 32)).astype("float32")
y = x @ rng.normal(size=(32, 1)) + 0.3 * rng.normal(size=(8192, 1))
data = x, y.astype("float32")
layers = [keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
model, optimizer = keras.Sequential(layers), keras.optimizers.Adam(3e-3)

def slow():
    for i in range(4000):
        time.sleep(0.030 if rank == 1 else 0.004)
        yield data[0][64 * i % 8000:][:64], data[1][64 * i % 8000:][:64]"""
STEP = """%%dist_run --data {data} --epochs 12
x, y = batch
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
gradients = tape.gradient(loss, model.trainable_variables)
optimizer.apply(gradients, model.trainable_variables)
loss"""
PARAMS = """%%dist_run --strategy pjrt
import jax, jax.numpy as jnp
grid = jax.make_mesh((2, 2), ("data", "model"))

def put(shape, *spec):
    at = jax.NamedSharding(grid, jax.P(*spec))
    return jax.make_array_from_callback(shape, at, lambda i: np.zeros(shape, "float32")[i])

def block():
    up, down = put((256, 1024), None, "model"), put((1024, 256), "model", None)
    return {"up": up, "down": down, "scale": put((256,))}

params = {"embed": put((4096, 256), "model", None), "layers": [block(), block()]}
opt = {"mu": put((4096, 256), "model", None), "nu": put((4096, 256)), "count": put(())}"""
START, SET_UP, TRAIN, STARVE, PLACE, SHOW = range(6)
CELLS = [
    "%load_ext nbdist\n%dist_start 2 hosts --framework both --devices-per-host 2",
    SETUP,
    STEP.format(data="data --batch 64"),
    STEP.format(data="slow"),
    PARAMS,
    "%dist_show params opt",
]
_STEP_IS = """([view, least]) => {
  const text = view.querySelector('.nbdist-figures').innerText;
  return Number((/step\\s+([\\d,]+)/i.exec(text)?.[1] ?? '0').replaceAll(',', '')) >= least;
}"""


def view(page: Page, index: int) -> Locator:
    return page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".nbdist-run")


def shoot_run(page: Page, index: int, name: str, least: int) -> None:
    """Take a screenshot of a run after a number of steps, then stop the run."""
    start(page, index)
    shown = view(page, index)
    shown.wait_for()
    shown.scroll_into_view_if_needed()  # the view is drawn only while it is visible
    page.wait_for_function(_STEP_IS, arg=[shown.element_handle(), least])
    if index == STARVE:
        shown.locator(".nbdist-badge").click()
        shown.get_by_text("starved").first.wait_for()
    shown.screenshot(path=IMAGES / f"{name}.png")
    if index == TRAIN and name == "run":
        page.locator(".nbdist-Panel").screenshot(path=IMAGES / "panel.png")
        page.screenshot(path=IMAGES / "tour.png")
    shown.get_by_role("button", name="Stop").click()
    wait(page, index)


def choose_theme(page: Page, theme: str) -> None:
    page.evaluate(
        "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme
    )
    page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(Path(folder) / "files") as lab,
        browser() as window,
    ):
        lab.write("train.ipynb", CELLS)
        page = window.new_page()
        lab.open(page, "train.ipynb")
        run(page, START)
        run(page, SET_UP)
        page.evaluate("() => window.jupyterapp.commands.execute('nbdist:open-panel')")
        shoot_run(page, TRAIN, "run", 700)
        shoot_run(page, STARVE, "straggler", 150)
        choose_theme(page, "JupyterLab Dark")
        shoot_run(page, TRAIN, "run-dark", 700)
        choose_theme(page, "JupyterLab Light")
        run(page, PLACE)
        run(page, SHOW)
        output = page.locator(".jp-Notebook .jp-Cell").nth(SHOW).locator(".jp-OutputArea")
        output.scroll_into_view_if_needed()
        output.screenshot(path=IMAGES / "placement.png")


if __name__ == "__main__":
    main()
