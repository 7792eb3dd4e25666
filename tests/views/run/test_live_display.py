"""Display of a run in the cell's output, if the front end shows only text or a widget."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import nbformat
import pytest
from ipykernel.zmqshell import ZMQInteractiveShell
from nbclient import NotebookClient

from nbdist.execution.result import Run
from nbdist.records import RANK_VARIABLE, RUN_MIME, Metrics
from nbdist.views import surface
from nbdist.views.run import cell_output
from nbdist.views.run import live_display as runs
from nbdist.views.run.cell_output import run_surface
from nbdist.views.run.live_display import (
    Ended,
    LineSurface,
    OutputSurface,
    RunPicture,
    RunView,
)
from tests.kernels import Kernel
from tests.runs import losses, recover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

CELLS = (
    "%load_ext nbdist\n%dist_start 2 --framework jax",
    "%%dist_run\nfor step in range(1, 201):\n    report(step=step, loss=1 / step)",
)


def feed(view: RunView, first: int, last: int) -> None:
    view.add(losses(first, last))
    view.flush()


def no_news() -> NoNews:
    return NoNews()


class NoNews:
    def news(self) -> Iterator[str | bytes]:
        return iter(())


def test_a_terminal_shows_a_line_per_interval_and_the_last_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    view = RunView(LineSurface())
    feed(view, 1, 3)
    assert capsys.readouterr().out == ""
    now += runs.LINE_INTERVAL_S
    feed(view, 4, 5)
    assert capsys.readouterr().out == "step 5 · loss 5 (last step) · 100 ms a step · 500 ms\n"
    feed(view, 6, 7)
    assert capsys.readouterr().out == ""
    view.close(Run(1))
    assert capsys.readouterr().out == (
        "step 7 · loss 7 (last step) · 100 ms a step · 700 ms\n<nbdist run 1: 0 ranks, 0 s>\n"
    )


class PictureDouble:
    """Double of a surface: it stores the words of the pictures."""

    interval_s, follows, has_picture = 0.0, False, True

    def __init__(self) -> None:
        self.words: list[tuple[str, ...]] = []

    def show(self, picture: RunPicture) -> None:
        self.words.append(picture.words)

    def close(self, run: Ended) -> None: ...


def test_a_run_that_reports_only_epochs_is_shown() -> None:
    surface = PictureDouble()
    view = RunView(surface)
    for rank in (0, 1):
        view.add_epoch(
            Metrics(rank=rank, cell=1, epoch=2, step=-1, time_s=1.5, own={"loss": float(rank)})
        )
    view.flush()
    assert surface.words == [("epoch 2", "loss 0.5 (last epoch)", "1.5 s")]
    view.add(losses(1, 3))
    view.add_epoch(Metrics(rank=0, cell=1, epoch=1, step=-1, time_s=2.0, own={"loss": 9.0}))
    assert view._latest[0].step == 3


def test_the_line_shows_a_recovery_and_continues_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    view = RunView(LineSurface())
    feed(view, 1, 7)
    view.recovering("rank 1 died in the cell\nand more")
    line = "recovering: rank 1 died in the cell · step 7 · loss 7 (last step) · 700 ms\n"
    assert capsys.readouterr().out == line
    view.recovered(recover(7, 4, time_s=2.0))
    now += runs.LINE_INTERVAL_S
    view.flush()
    assert capsys.readouterr().out == "resuming after step 4\n"
    now += runs.LINE_INTERVAL_S
    view.add(losses(5, 5, lost_s=1.6))
    view.add(losses(6, 6, lost_s=1.6))
    view.flush()
    line = "step 6 · loss 6 (last step) · 100 ms a step · 2.2 s · recovered once\n"
    assert capsys.readouterr().out == line, "the step time includes the recovery"


def test_a_run_outside_a_notebook_has_lines_only() -> None:
    assert isinstance(run_surface("a", no_news, "auto"), LineSurface)
    assert isinstance(run_surface("a", no_news, "widget"), LineSurface)


def test_front_end_and_setting_choose_the_view_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cell_output, "in_notebook", lambda: True)
    for name in ("VSCODE_PID", "VSCODE_CWD"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(run_surface("a", no_news, "auto"), OutputSurface)
    assert isinstance(run_surface("a", no_news, "text"), LineSurface)
    assert type(run_surface("a", no_news, "widget")).__name__ == "WidgetSurface"
    monkeypatch.setenv("VSCODE_PID", "1")
    assert type(run_surface("a", no_news, "auto")).__name__ == "WidgetSurface"
    assert isinstance(run_surface("a", no_news, "lab"), OutputSurface)
    assert isinstance(run_surface("", no_news, "widget"), OutputSurface)


def executed(monkeypatch: pytest.MonkeyPatch, view: str) -> list[NotebookNode]:
    """Run a notebook with nbclient, as papermill does, and return the outputs of its run."""
    monkeypatch.setenv("NBDIST_VIEW", view)
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    outputs: list[NotebookNode] = notebook.cells[1].outputs
    return outputs


@pytest.mark.full  # test_notebooks.py contains such a run
def test_a_notebook_without_a_front_end_contains_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = executed(monkeypatch, "auto")
    (shown,) = (o.data for o in outputs if o.output_type == "display_data")
    assert set(shown) == {RUN_MIME, "text/html", "text/plain"}
    assert "step 200" in shown["text/plain"]


@pytest.mark.full  # the last line of a terminal is the same
def test_the_last_line_of_the_text_view_is_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = executed(monkeypatch, "text")
    assert {o.output_type for o in outputs} == {"stream"}
    text = "".join(o.text for o in outputs)
    assert any(
        line.startswith("step 200 · loss 0.005 (last step) ·") for line in text.splitlines()
    ), text


@pytest.mark.processes
def test_a_widget_receives_rows_and_is_closed() -> None:
    """Check the messages of the kernel. `tests/browser/test_widget.py` tests the page."""
    with Kernel() as kernel:
        kernel.run("import os; os.environ['NBDIST_VIEW'] = 'widget'").check()
        kernel.run(CELLS[0]).check()
        request = kernel.send(CELLS[1])
        opened, rows, closed = set[str](), 0, set[str]()
        while (message := kernel.client.get_iopub_msg(timeout=60))["msg_type"] != "comm_close":
            content = message["content"]
            if message["msg_type"] == "comm_open" and "_esm" in content["data"]["state"]:
                opened.add(content["comm_id"])
            elif content.get("data", {}).get("method") == "custom":
                assert content["data"]["content"]["type"] == "Rows"
                rows += len(message["buffers"])
        closed.add(message["content"]["comm_id"])
        assert opened == closed
        assert rows
        kernel.reply(request)
        kernel.run("%dist_stop").check()


def test_a_shell_derived_from_that_of_ipykernel_is_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shell of Colab is such a class."""
    shell = object.__new__(type("Shell", (ZMQInteractiveShell,), {}))
    monkeypatch.setattr(surface, "get_ipython", lambda: shell)
    assert surface.in_notebook()
    monkeypatch.setenv(RANK_VARIABLE, "0")
    assert not surface.in_notebook(), "an engine also has such a shell"
