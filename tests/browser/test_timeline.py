"""Timeline of a trace in a saved notebook, in a real JupyterLab and in nbconvert's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
from nbconvert import HTMLExporter

from nbdist.records import HOST_COPIES, Trace
from nbdist.utils.timelines import timeline_of
from nbdist.views.trace import TracePicture
from tests.browser.lab import PIXELS, change_theme, until, violations
from tests.utils.test_timelines import busy
from tests.views.test_trace import TRACE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.browser.lab import Lab

NAME = "traced.ipynb"
OUTPUT = ".nbdist-TraceOutput"
MIDDLE = "canvas => 190 + (canvas.clientWidth - 198) * 103.5 / 199.5"
"""Script that returns the place of 103.5 ms on the canvas, in pixels. An operation runs then."""


def traced() -> Trace:
    """Return a trace of 20 steps on two ranks with two devices each."""
    spans = []
    for step in range(20):
        for rank in (0, 1):
            at = 10 * step
            spans.append(busy(at, at + 1 + rank, "wait", "input", HOST_COPIES, rank))
            for device in (0, 1):
                spans.append(busy(at + 2, at + 5, "dot", "compute", device, rank))
                spans.append(busy(at + 5.1, at + 7, "fusion of tanh", "compute", device, rank))
                spans.append(busy(at + 7, at + 9.5, "all-reduce", "collective", device, rank))
    fields = {name: getattr(TRACE, name) for name in Trace.__struct_fields__}
    return Trace(**(fields | {"timeline": timeline_of(spans, most=4000)}))


def write(lab: Lab) -> Path:
    """Write a notebook that contains the trace, as after its kernel has ended."""
    data = TracePicture(traced())._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data=data)
    cell = nbformat.v4.new_code_cell("%%dist_trace", outputs=[output], execution_count=1)
    path = lab.server.home / NAME
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, path)
    return path


def test_a_saved_timeline_zooms_without_a_kernel(
    lab: Lab, page: Page, pictures: Path, themes: Sequence[str]
) -> None:
    write(lab)
    lab.show(page, NAME)
    output = page.locator(OUTPUT)
    canvas = output.get_by_role("img", name="Timeline of 199.5 ms")
    canvas.wait_for()
    output.get_by_text("all-reduce").first.wait_for()  # the tables stay below
    assert output.locator("img").count() == 0
    whole = canvas.evaluate(PIXELS)
    middle = canvas.evaluate(MIDDLE)
    canvas.hover(position={"x": middle, "y": 2 * 18 + 6})
    readout = output.locator(".nbdist-readout")
    until(page, lambda: "rank 0 · device 0 · compute" in readout.inner_text(), readout.inner_text)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -2000)
    page.keyboard.up("Control")
    output.get_by_role("button", name="Reset zoom").wait_for()
    until(page, lambda: canvas.evaluate(PIXELS) != whole)
    page.screenshot(path=pictures / "timeline-zoomed.png")
    output.get_by_role("button", name="Reset zoom").click()
    canvas.hover(position={"x": 2, "y": 2})
    until(page, lambda: canvas.evaluate(PIXELS) == whole)
    for theme in themes:
        change_theme(page, theme)
        page.screenshot(path=pictures / f"timeline-{theme.split()[1].lower()}.png")
    assert violations(page, OUTPUT) == []


def test_the_static_picture_is_in_the_converted_page(lab: Lab, page: Page, pictures: Path) -> None:
    body, _ = HTMLExporter().from_filename(str(write(lab)))
    assert "data:image/svg+xml;base64," in body
    converted = lab.server.home / "traced.html"
    converted.write_text(body)
    page.goto(converted.as_uri())
    picture = page.get_by_role("img", name="Timeline of 199.5 ms")
    assert picture.evaluate("image => image.complete && image.naturalWidth") == 760
    page.screenshot(path=pictures / "timeline-nbconvert.png")
