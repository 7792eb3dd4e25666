"""Run view by keyboard, with forced colours and with more contrast."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.records import Columns, Finding, Rows
from tests.browser.lab import until, violations
from tests.browser.test_media import contents
from tests.runs import new_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Locator, Page

    from nbdist.telemetry.run_writer import RunDirectory
    from tests.browser.lab import Lab

COLUMNS = Columns(measures=("step_s",), own=("loss", "accuracy"))
MEDIA: dict[str, dict[str, Any]] = {
    "forced, light": {"forced_colors": "active", "color_scheme": "light"},
    "forced, dark": {"forced_colors": "active", "color_scheme": "dark"},
    "more contrast": {"contrast": "more"},
}
_DEFAULT_MEDIA: dict[str, Any] = {
    "forced_colors": "null",
    "contrast": "null",
    "color_scheme": "null",
}
_FAINT = """view => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d');
  const luminance = (...colours) => {
    colours.forEach(colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); });
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].map(byte => byte / 255);
    const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = getComputedStyle(view).backgroundColor;
  const words = view.querySelectorAll('dt, dd, label, td, th, .nbdist-line *, .nbdist-tab');
  return [...words].filter(element => {
    const {color} = getComputedStyle(element);
    const [low, high] = [luminance(ground), luminance(ground, color)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < 7;
  }).map(element => element.outerHTML);
}"""
_CONTROLS = """view => [...view.querySelectorAll(
    'button, select, input, summary, [tabindex="0"]')].filter(
  element => element.checkVisibility() && element.tabIndex >= 0
    && !(element.type === 'radio' && !element.checked))"""
"""Script that returns the elements that Tab reaches. It reaches only the checked radio button."""

_OUTLINED = """element => {
  const shown = element.type === 'radio' ? element.nextElementSibling : element;
  const {outlineStyle, outlineWidth} = getComputedStyle(shown);
  return outlineStyle === 'solid' && parseFloat(outlineWidth) >= 2;
}"""


def report(run: RunDirectory, rank: int) -> None:
    """Report 30 steps of a rank."""
    step = np.arange(1, 31, dtype=float)
    columns = [
        np.full(30, rank),
        np.ones(30),
        step,
        step / 10,
        np.full(30, 0.1),
        1 / step,
        step,
    ]
    run.take(Rows(rank=rank, cell=1, columns=COLUMNS, values=np.stack(columns, 1).tobytes()))
    run.flush()


@pytest.fixture(scope="module")
def stored_run(lab: Lab) -> Iterator[RunDirectory]:
    """Provide an active run with everything that the view can show."""
    run = new_run(lab.server.runs, steps=100, batch=64)
    for rank in (0, 1):
        report(run, rank)
    for one in contents():
        run.take(one)
    run.update(findings=(Finding("straggler", "rank 1 is slow: `%dist_status`", (1,), 1.5),))
    yield run
    run.update(status="finished", ended=time.time())
    run.close()


@pytest.fixture(scope="module")
def tab(lab: Lab, window: BrowserContext, stored_run: RunDirectory) -> Iterator[Page]:
    """Open the run in a tab of a JupyterLab."""
    page = window.new_page()
    lab.show(page, waits_for="#jp-main-dock-panel")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('nbdist:open-run')")
    command = "id => window.jupyterapp.commands.execute('nbdist:open-run', {id})"
    page.evaluate(command, stored_run.state.id)
    page.locator(".nbdist-RunTab .nbdist-chip").first.wait_for()
    page.locator(".nbdist-RunTab td", has_text="straggler").wait_for()
    yield page
    page.close()


@pytest.fixture
def view(tab: Page) -> Iterator[Locator]:
    """Provide the view without the media settings of the previous test."""
    yield tab.locator(".nbdist-RunTab .nbdist-run")
    tab.emulate_media(**_DEFAULT_MEDIA)


def colour(element: Locator, name: str = "backgroundColor") -> str:
    value: str = element.evaluate("(element, name) => getComputedStyle(element)[name]", name)
    return value


@pytest.mark.parametrize(
    "name",
    ["forced, light", pytest.param("forced, dark", marks=pytest.mark.full), "more contrast"],
)
def test_run_view_has_no_violations_in_each_colour_mode(
    tab: Page, view: Locator, pictures: Path, name: str
) -> None:
    tab.emulate_media(**MEDIA[name])
    assert violations(tab, ".nbdist-RunTab .nbdist-run") == []
    view.screenshot(path=pictures / f"access {name}.png")
    chosen, other = (view.locator(f".nbdist-choice:{at}-child span") for at in ("first", "last"))
    assert colour(chosen) not in ("rgba(0, 0, 0, 0)", colour(other))
    assert colour(chosen) != colour(chosen, "color")
    edge = "borderBlockEndColor"
    selected, unselected = (
        view.get_by_role("tab", selected=state).first for state in (True, False)
    )
    ground = colour(view)
    assert colour(selected, edge) != ground
    assert colour(unselected, edge) in (ground, "rgba(0, 0, 0, 0)")
    assert colour(view.locator(".nbdist-done")) not in (ground, colour(view.locator(".nbdist-bar")))


def test_text_has_contrast_of_seven_with_more_contrast(tab: Page, view: Locator) -> None:
    """Check the ratio of level AAA of WCAG 2.2."""
    assert view.evaluate(_FAINT), "by default, some text has less contrast"
    tab.emulate_media(contrast="more")
    assert view.evaluate(_FAINT) == []


@pytest.mark.parametrize(
    "media",
    [{}, pytest.param({"forced_colors": "active"}, marks=pytest.mark.full)],
    ids=["usual", "forced"],
)
def test_tab_key_reaches_every_control_and_shows_the_focus(
    tab: Page, view: Locator, media: dict[str, Any]
) -> None:
    tab.emulate_media(**media)
    controls = view.evaluate_handle(_CONTROLS)
    count = controls.evaluate("controls => controls.length")
    first = controls.get_property("0").as_element()
    assert first is not None
    first.focus()
    for index in range(count):
        is_there = "(controls, index) => document.activeElement === controls[index]"
        assert controls.evaluate(is_there, index), index
        focused = tab.evaluate_handle("() => document.activeElement").as_element()
        assert focused is not None
        if index > 0:  # a script focused the first control
            assert focused.evaluate(_OUTLINED), focused.evaluate("element => element.outerHTML")
        tab.keyboard.press("Tab")
    assert not view.evaluate("view => view.contains(document.activeElement)"), (
        "Tab does not leave the view"
    )


def test_lines_are_toggled_by_keys(tab: Page, view: Locator) -> None:
    chips = view.locator("button.nbdist-chip")
    first, second = chips.nth(0), chips.nth(1)
    first.focus()
    for key, hidden in (("Enter", "false"), ("Space", "true")):
        tab.keyboard.press(key)
        tab.locator(f"button.nbdist-chip[aria-pressed={hidden}]:focus").wait_for()
    tab.keyboard.press("Alt+Enter")
    view.locator("button.nbdist-chip[aria-pressed=false]").first.wait_for()
    pressed = [first, second]
    until(tab, lambda: [c.get_attribute("aria-pressed") for c in pressed] == ["true", "false"])
    tab.keyboard.press("Alt+Enter")
    view.locator("button.nbdist-chip[aria-pressed=false]").first.wait_for(state="detached")


def test_tabs_axis_and_tables_work_by_keys(tab: Page, view: Locator) -> None:
    view.get_by_role("tab", name="Metrics").focus()
    tab.keyboard.press("ArrowRight")
    view.get_by_role("figure").get_by_text("step time", exact=True).wait_for()
    tab.keyboard.press("Home")
    view.get_by_role("img", name="Chart of loss").wait_for()
    view.get_by_role("radio", name="Step").focus()
    tab.keyboard.press("ArrowRight")
    view.get_by_role("img", name="from 100 ms").first.wait_for()
    tab.keyboard.press("ArrowLeft")
    view.get_by_role("img", name="from step 1").first.wait_for()
    view.get_by_role("button", name="state").focus()
    tab.keyboard.press("Enter")
    view.locator("th[aria-sort=ascending]", has_text="state").wait_for()
    view.locator("summary", has_text="Data").first.focus()
    tab.keyboard.press("Enter")
    view.get_by_role("columnheader", name="rank 1").wait_for()
    tab.keyboard.press("Enter")


def test_zoom_of_a_chart_by_keys_keeps_the_focus(tab: Page, view: Locator) -> None:
    plot = view.get_by_role("group", name="loss", exact=True)
    plot.focus()
    tab.keyboard.press("+")
    reset = view.get_by_role("button", name="Reset zoom")
    reset.wait_for()
    reset.focus()
    tab.keyboard.press("Enter")
    reset.wait_for(state="hidden")
    assert plot.evaluate("plot => plot === document.activeElement")


def test_a_new_line_does_not_move_the_focus(
    tab: Page, view: Locator, stored_run: RunDirectory
) -> None:
    chips = view.locator("button.nbdist-chip")
    chips.filter(has_text="rank 1").first.focus()
    report(stored_run, 2)
    chips.filter(has_text="rank 2").first.wait_for()
    assert "rank 1" in tab.locator("button.nbdist-chip:focus").inner_text()
