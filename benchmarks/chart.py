"""Frames per second of a run's view in Chromium, with 4, 64 and 256 workers of 10,000 points each.

The peer is the display refresh: a page that draws nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, Skipped
from tests.browser.lab import browser, chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

    from benchmarks.case import Scale

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


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    """Yield cases in milliseconds per frame."""
    workers, points, seconds = scale.of((WANTED, POINTS, SECONDS), ({4: 55}, 100, 0.5))
    if chromium() is None:
        for ranks in workers:
            yield Skipped(_name(ranks, points), "no Chromium on the path")
        return
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        path = Path(folder, "chart.html")
        style = (EXTENSION / "style" / "run.css").read_text(encoding="utf-8")
        path.write_text(_PAGE.format(style=style, script=_bundle()), encoding="utf-8")
        page = window.new_page()
        page.goto(path.as_uri())
        for ranks, wanted in workers.items():
            yield _case(page, ranks, wanted, points, seconds)


def _name(ranks: int, points: int) -> str:
    return f"frame of a run with {ranks} workers x {points:,} points, against an empty page"


def _case(page: Page, ranks: int, wanted: int, points: int, seconds: float) -> Case:
    idle = page.evaluate(_IDLE, seconds)
    load = {"ranks": ranks, "points": points, "seconds": seconds}
    found: dict[str, Any] = page.evaluate(_MEASURE, load)
    return Case(
        _name(ranks, points),
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
    built = subprocess.run(
        command, cwd=EXTENSION, check=True, capture_output=True, text=True, timeout=120
    )
    return built.stdout
