"""Frames per second of a run's view in Chromium, with 4, 64 and 256 workers of 10,000 points each.

The peer is the display refresh: a page that draws nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case
from tests.browser.lab import browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

EXTENSION = Path(__file__).parents[1] / "labextension"
WANTED = {4: 55, 64: 50, 256: 30}
"""Target in frames per second, by number of workers."""

POINTS = 10_000
SECONDS = 5
_PAGE = """<!doctype html><meta charset="utf-8"><style>{style}</style>
<div id="host" style="inline-size: 900px"></div><script>{script}</script>"""
_IDLE = """seconds => new Promise(resolve => {
  let frames = 0, began = null;
  const frame = now => {
    began ??= now;
    if (now - began >= 1000 * seconds) resolve(1000 * frames / (now - began));
    else { frames += 1; requestAnimationFrame(frame); }
  };
  requestAnimationFrame(frame);
})"""
_MEASURE = "load => chart.measure(document.getElementById('host'), load)"


def cases() -> Iterator[Case]:
    """Yield cases in milliseconds per frame."""
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        path = Path(folder, "chart.html")
        style = (EXTENSION / "style" / "run.css").read_text(encoding="utf-8")
        path.write_text(_PAGE.format(style=style, script=_bundle()), encoding="utf-8")
        page = window.new_page()
        page.goto(path.as_uri())
        for ranks, wanted in WANTED.items():
            yield _case(page, ranks, wanted)


def _case(page: Page, ranks: int, wanted: int) -> Case:
    idle = page.evaluate(_IDLE, SECONDS)
    load = {"ranks": ranks, "points": POINTS, "seconds": SECONDS}
    found: dict[str, Any] = page.evaluate(_MEASURE, load)
    return Case(
        f"{ranks} workers x {POINTS:,} points, ms a frame against a page that draws nothing",
        1000 / found["framesPerSecond"],
        1000 / idle,
        unit="ms",
        target=round(idle / wanted, 3),
        runs=1,
    )


def _bundle() -> str:
    """Return the bench of the extension as one script."""
    esbuild = EXTENSION / "node_modules" / ".bin" / "esbuild"
    options = ("--bundle", "--format=iife", "--global-name=chart", "--loader:.css=text")
    command = [str(esbuild), "bench/chart.ts", *options]
    built = subprocess.run(command, cwd=EXTENSION, check=True, capture_output=True, text=True)
    return built.stdout
