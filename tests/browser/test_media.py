"""Histograms, images, tables and texts of a run, in a tab of a real JupyterLab."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import Media
from nbdist.worker.runtime import media
from tests.browser.lab import change_theme, until
from tests.browser.test_run_tab import show, steps
from tests.runs import new_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from playwright.sync_api import BrowserContext, Locator, Page

    from nbdist.telemetry.run_writer import RunDirectory
    from tests.browser.lab import Lab


def content(kind: str, name: str, value: Any, step: int = 1, rank: int = 0) -> Media:
    """Return the record of a value that a cell reports."""
    converted, _ = media.converted(kind, name, value)
    return Media(
        rank=rank, cell=1, name=name, epoch=-1, step=step, time_s=step / 10, content=converted
    )


def contents() -> Iterator[Media]:
    """Yield contents of each kind: three steps of two ranks, and one of a single rank."""
    draw = np.random.default_rng(0)
    for step in (1, 2, 3):
        for rank in (0, 1):
            weights = np.append(draw.normal(step, 1 + rank, 5000), np.nan)
            yield content("hist", "weights", weights, step, rank)
            shade = np.linspace(0, step / 3, 28)
            yield content("image", "sample", np.outer(shade, shade), step, rank)
    errors = [{"label": "cat", "found": "dog", "loss": 1.25}, {"label": "ox", "found": None}]
    yield content("table", "errors", errors, 3)
    yield content("text", "note", "the first line\nthe second line", 3)


@pytest.fixture(scope="module")
def tab(lab: Lab, window: BrowserContext) -> Iterator[Page]:
    page = window.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    lab.show(page, waits_for="#jp-main-dock-panel")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-run')")
    yield page
    page.close()
    assert not errors


@pytest.fixture
def run(lab: Lab) -> Iterator[RunDirectory]:
    """Provide an active run with contents of each kind."""
    created = new_run(lab.server.runs)
    for rank in (0, 1):
        created.take(steps(1, 3, rank, 1 + rank))
    for one in contents():
        created.take(one)
    created.flush()
    yield created
    created.update(status="finished", ended=time.time())
    created.close()


def card(shown: Locator, name: str) -> Locator:
    return shown.get_by_role("figure", name=name, exact=True)


def test_each_kind_is_shown(
    tab: Page, run: RunDirectory, pictures: Path, themes: Sequence[str]
) -> None:
    shown = show(tab, run.state.id)
    card(shown, "weights").get_by_role("img", name="weights, step 3: mean").wait_for()
    card(shown, "weights").get_by_text("1 value is NaN or infinite").wait_for()
    card(shown, "sample").get_by_alt_text("sample, step 3").wait_for()
    assert card(shown, "errors").get_by_role("row").all_inner_texts() == [
        "label\tfound\tloss",
        "cat\tdog\t1.250",
        "ox\t\t",
    ]
    card(shown, "note").get_by_text("the first line\nthe second line").wait_for()
    for theme in themes:
        change_theme(tab, theme)
        shown.screenshot(path=pictures / f"media-{theme.split()[1].lower()}.png")


def test_a_step_and_a_rank_are_chosen(tab: Page, run: RunDirectory) -> None:
    shown = show(tab, run.state.id)
    weights = card(shown, "weights")
    weights.get_by_label("Step of weights").fill("0")
    weights.get_by_role("img", name="weights, step 1: mean").wait_for()
    weights.get_by_label("Rank of weights").select_option("1")
    weights.get_by_role("img", name="std 2.0").wait_for()
    assert not card(shown, "note").get_by_role("slider").is_visible()
    assert not card(shown, "note").get_by_role("combobox").is_visible()


def test_the_newest_step_is_followed_unless_one_is_chosen(tab: Page, run: RunDirectory) -> None:
    shown = show(tab, run.state.id)
    card(shown, "sample").get_by_alt_text("sample, step 3").wait_for()
    card(shown, "weights").get_by_label("Step of weights").fill("1")
    card(shown, "weights").get_by_role("img", name="weights, step 2").wait_for()
    run.take(content("image", "sample", np.zeros((4, 4)), 4))
    run.take(content("hist", "weights", [1.0, 2.0], 4))
    card(shown, "sample").get_by_alt_text("sample, step 4").wait_for()
    slider = card(shown, "weights").get_by_label("Step of weights")
    until(tab, lambda: slider.get_attribute("max") == "3")
    assert slider.input_value() == "1"
    card(shown, "weights").get_by_role("img", name="weights, step 2").wait_for()


def test_a_run_without_media_has_no_section(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 3))
    run.flush()
    shown = show(tab, run.state.id)
    shown.get_by_role("img", name="Chart of loss").wait_for()
    assert not shown.locator(".nbdist-media").is_visible()
    run.update(status="finished", ended=time.time())
    run.close()
