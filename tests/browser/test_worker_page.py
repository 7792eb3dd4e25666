"""Use of the hosts in the run view, and the page of one worker, in a real JupyterLab."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from nbdist.records import SYSTEM, Columns, Output, SystemSample
from tests.browser.lab import until, violations
from tests.browser.test_run_tab import show, steps
from tests.browser.test_run_tab import tab as tab
from tests.runs import new_run, rows
from tests.telemetry.test_stacks import position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Page

    from nbdist.telemetry.run_writer import RunDirectory
    from tests.browser.lab import Lab

DATA = "table.nbdist-data"
BETWEEN = ["workers", "between", "reports", "200", "ms", "200", "ms"]


@pytest.fixture
def kept(lab: Lab) -> Iterator[RunDirectory]:
    """Provide a run of two ranks with a minute of steps and samples of the hosts."""
    run = new_run(lab.server.runs)
    for rank in (0, 1):
        run.take(steps(1, 6000, rank))
        for second in range(2, 62, 2):
            values = dict.fromkeys(SYSTEM, (1 + rank) * second / 100)
            run.take(SystemSample(rank=rank, cell=1, time_s=second, values=values))
    run.flush()
    yield run
    run.update(status="finished", ended=time.time())
    run.close()


def test_system_tab_shows_the_use_of_hosts_and_gpus(
    kept: RunDirectory, tab: Page, photograph: Callable[[Page, str], None]
) -> None:
    shown = show(tab, kept.state.id)
    shown.get_by_role("tab", name="System").click()
    charts = shown.locator(".nbdist-chart")
    until(tab, lambda: charts.count() == len(SYSTEM))
    power = charts.filter(has_text="GPU power (W)")
    power.get_by_text("Data", exact=True).click()
    last = power.locator("tbody tr").last
    until(
        tab,
        lambda: last.inner_text().split() == ["1", "min", "00", "s", "0.9000", "0.6000", "1.200"],
        last.inner_text,
    )
    assert violations(tab, f"#nbdist-run-{kept.state.id}") == []
    photograph(tab, "system")


def test_row_of_a_worker_opens_its_page(
    kept: RunDirectory, tab: Page, photograph: Callable[[Page, str], None]
) -> None:
    lines = [f"\x1b[32mline {i}\x1b[0m of the log\n" for i in range(200)]
    kept.take(Output(rank=1, cell=1, stream="stdout", text="".join(lines)))
    kept.flush()
    show(tab, kept.state.id).locator("tr", has_text="here").nth(1).click()
    page = tab.locator(f"#nbdist-worker-{kept.state.id}-1")
    page.get_by_text("here · pid 1 · 1 x cpu").wait_for()
    tab.get_by_role("tab", name=f"Worker 1 · Cell {kept.state.label}").wait_for()
    log = page.get_by_role("group", name="Log")
    until(tab, lambda: log.inner_text().splitlines()[-1:] == ["line 199 of the log"])
    assert log.evaluate("pre => pre.scrollHeight - pre.scrollTop - pre.clientHeight") < 8
    photograph(tab, "worker-log")
    page.get_by_role("searchbox").fill("LINE 19")
    page.get_by_text("11 of 200 lines").wait_for()
    kept.take(Output(rank=1, cell=1, stream="stdout", text="line 19 again\n"))
    kept.flush()
    until(tab, lambda: log.inner_text().splitlines()[-1:] == ["line 19 again"])

    page.get_by_role("tab", name="Stack").click()
    until(tab, lambda: kept.stacks.take_requests() == {1})
    kept.take(position())
    page.get_by_text("step 7 · Cell In[3], line 2 · waits for another thread").wait_for()
    stack = page.get_by_role("group", name="Stack of the main thread")
    assert stack.inner_text() == position().stack
    page.get_by_role("button", name="Read the stack now").click()
    until(tab, lambda: kept.stacks.take_requests() == {1})
    page.get_by_text("No answer: native code holds the interpreter").wait_for()

    page.get_by_role("tab", name="Timings").click()
    until(tab, lambda: page.locator(".nbdist-timings tbody tr").count() == 1)
    assert page.locator(".nbdist-timings").inner_text().split()[-6:] == [
        *["10", "ms", "100", "%", "10", "ms"]
    ]
    until(tab, lambda: page.locator(".nbdist-chart").count() == 1)
    photograph(tab, "worker-timings")
    page.get_by_role("tab", name="System").click()
    until(tab, lambda: page.locator(".nbdist-chart").count() == len(SYSTEM))
    assert violations(tab, f"#nbdist-worker-{kept.state.id}-1") == []

    kept.update(status="finished", ended=time.time())
    page.get_by_role("tab", name="Stack").click()
    page.get_by_text("The last stack before the end:").wait_for()
    assert page.get_by_role("button", name="Read the stack now").is_disabled()
    photograph(tab, "worker-stack")


def test_loop_that_calls_report_has_the_times_between_its_reports(
    lab: Lab, tab: Page, photograph: Callable[[Page, str], None]
) -> None:
    kept = new_run(lab.server.runs, kind="", replicas=0, stoppable=False)
    between = Columns(measures=("report_s",))
    for rank in (0, 1):
        kept.take(rows([[rank, -1, step, 0.2 * step, 1 / step] for step in range(1, 41)]))
        kept.take(rows([[rank, -1, step, 0.2 * step, 0.2] for step in range(2, 41)], between))
    kept.flush()
    shown = show(tab, kept.state.id)
    shown.get_by_text("between reports").wait_for()
    shown.get_by_role("button", name="ms/report").wait_for()
    shown.get_by_role("tab", name="Throughput").click()
    shown.locator(".nbdist-chart", has_text="reports/s").wait_for()
    shown.get_by_role("tab", name="Step time").click()
    shown.locator(".nbdist-chart", has_text="between reports").wait_for()
    photograph(tab, "run-reports")
    shown.locator("tr", has_text="here").nth(1).click()
    page = tab.locator(f"#nbdist-worker-{kept.state.id}-1")
    page.get_by_role("tab", name="Timings").click()
    times = page.locator(".nbdist-timings")
    until(tab, lambda: times.inner_text().split()[-7:] == BETWEEN, times.inner_text)
    page.locator(".nbdist-chart", has_text="between reports").wait_for()
    photograph(tab, "worker-reports")
    kept.update(status="finished", ended=time.time())
    kept.close()


def test_run_without_samples_has_an_empty_system_tab(lab: Lab, tab: Page) -> None:
    run = new_run(lab.server.runs)
    run.take(steps(1, 3))
    run.update(status="finished", ended=time.time())
    run.close()
    shown = show(tab, run.state.id)
    shown.get_by_role("tab", name="System").click()
    shown.get_by_text("No samples of the hosts").wait_for()
