"""Opening of the tab of all runs in Chromium, with 1,000 stored runs.

The peer is JupyterLab's viewer of a CSV file with the same runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.case import Case, Skipped
from tests.browser.lab import Lab, browser, chromium
from tests.runs import losses, new_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

    from benchmarks.case import Scale

RUNS, ROUNDS = 1000, 5
MOST_S = 1.0
BEGAN = 1_790_000_000.0
"""Start of the first run, in seconds since 1970."""

NAME = "opening of the tab of {:,} runs until its first lines, against a CSV file in JupyterLab"
CSV = "runs.csv"
_Opening = tuple[str, dict[str, str], str]
"""Command, its arguments, and a selector of the element that it shows."""

_READY = "() => window.jupyterapp?.commands.hasCommand('nbdist:open-runs')"
_TIMED = """([command, args, selector]) => new Promise(resolve => {
  const began = performance.now();
  const look = () => document.querySelector(selector) === null
    ? requestAnimationFrame(look)
    : requestAnimationFrame(() => resolve((performance.now() - began) / 1000));
  void window.jupyterapp.commands.execute(command, args);
  look();
})"""
_CLOSE = "() => window.jupyterapp.commands.execute('application:close-all')"
_OURS: _Opening = ("nbdist:open-runs", {}, ".nbdist-RunsTab tr[data-run]")
_PEER: _Opening = ("docmanager:open", {"path": CSV}, ".jp-CSVViewer canvas")


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    count = scale.of(RUNS, 20)
    name = NAME.format(count)
    if chromium() is None:
        yield Skipped(name, "no Chromium on the path")
        return
    rounds = scale.runs(ROUNDS)
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab, browser() as window:
        _store(lab, count)
        page = window.new_page()
        lab.show(page, waits_for="#jp-main-dock-panel")
        page.wait_for_function(_READY)
        times = [(_seconds(page, _OURS), _seconds(page, _PEER)) for _ in range(rounds)]
    ours_s, peer_s = map(median, zip(*times, strict=True))
    target = round(MOST_S / peer_s, 3)
    first = f"{times[0][0]:.2f} s the first time"
    yield Case(name, ours_s, peer_s, unit="s", target=target, runs=rounds, detail=first)


def _store(lab: Lab, count: int) -> None:
    """Write ended runs of two ranks, and a CSV file with a line for each."""
    lines = ["id,epochs,learning_rate,loss"]
    for number in range(count):
        began = BEGAN + 60 * number
        run = new_run(
            lab.server.runs,
            began=began,
            ended=began + 30,
            status="finished",
            header=f"%%dist_run --data train --epochs {number}",
            hyperparameters={"--epochs": number, "learning_rate": 0.1 / (1 + number)},
        )
        for rank in (0, 1):
            run.take(losses(1, 50, rank))
        run.close()
        lines.append(f"{run.state.id},{number},{0.1 / (1 + number)},50.05")
    (lab.server.home / CSV).write_text("\n".join(lines))


def _seconds(page: Page, opening: _Opening) -> float:
    took: float = page.evaluate(_TIMED, list(opening))
    page.evaluate(_CLOSE)
    page.locator(opening[2]).first.wait_for(state="detached")
    return took
