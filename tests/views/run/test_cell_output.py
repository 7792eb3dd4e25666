from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.execution.result import Run
from nbdist.records import Display, Metrics, Output
from nbdist.views import formatting
from nbdist.views.run.cell_output import CellView
from nbdist.views.run.live_display import LineSurface, RunView
from nbdist.views.run.metrics import MetricTable, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

HOSTS = {0: "a", 1: "a", 2: "a"}


def forget(_: str) -> None: ...


def view(limit: int = 10_000, keep: Callable[[str], None] = forget) -> CellView:
    return CellView(HOSTS, 60, limit, run=RunView(LineSurface()), keep=keep)


def output(rank: int, text: str, stream: str = "stdout") -> Output:
    return Output(rank=rank, cell=1, stream=stream, text=text)  # type: ignore[arg-type]


def shown(records: list[Output | Display | Metrics], capsys: pytest.CaptureFixture[str]) -> str:
    cell = view()
    for record in records:
        cell.add(record)
    cell.flush(everything=True)
    return capsys.readouterr().out


def test_lines_are_labelled_and_folded(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([output(0, "x\ny0\n"), output(1, "x\ny1\n"), output(2, "x\n")], capsys)
    assert out.splitlines() == ["[0-2@a] x", "[0@a] y0", "[1@a] y1"]


def test_a_line_in_parts_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(
        [output(0, "he"), output(0, "llo\nwor"), output(0, "ld")], capsys
    ).splitlines() == [
        "[0@a] hello",
        "[0@a] world",
    ]


def test_the_last_state_of_a_progress_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([output(0, "\r 1%"), output(0, "\r50%\r100%\n")], capsys) == "[0@a] 100%\n"
    assert shown([output(0, "dos\r\n")], capsys) == "[0@a] dos\n"


def test_stderr_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    cell = view()
    cell.add(output(1, "oops\n", "stderr"))
    cell.flush(everything=True)
    assert capsys.readouterr().err == "[1@a] oops\n"


def test_equal_results_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Display(rank=r, cell=1, data={"text/plain": "7"}, metadata={}, result=True) for r in HOSTS
    ]
    assert shown(list(results), capsys) == "[0-2@a] Out: 7\n"


def test_results_that_differ_by_address_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    results: list[Output | Display | Metrics] = [
        Display(
            rank=rank,
            cell=1,
            data={"text/plain": f"<keras.History at 0x7f00{rank}>"},
            metadata={},
            result=True,
        )
        for rank in HOSTS
    ]
    assert shown(results, capsys) == "[0-2@a] Out: <keras.History>\n"


def test_rich_displays_are_text_without_ipython(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"text/plain": "bar 0%", "text/html": "<b>bar</b>"}
    first = Display(rank=0, cell=1, data=data, metadata={}, display_id="bar")
    later = Display(rank=0, cell=1, data=data, metadata={}, display_id="bar", update=True)
    assert shown([first, later], capsys) == "[0@a] bar 0%\n"
    html = Display(rank=0, cell=1, data={"text/html": "<b>bar</b>"}, metadata={})
    assert shown([html], capsys) == ""


def test_only_the_end_is_shown_beyond_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    cell = view(limit=1000)
    for i in range(2000):
        cell.add(output(0, f"line {i}\n"))
    cell.flush(everything=True)
    out = capsys.readouterr().out
    assert "line 0\n" in out
    assert "line 1999" in out
    assert "line 1000\n" not in out
    assert "more lines" in out
    assert len(out) < 3000


def test_shown_text_is_stored_for_later_readers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored: list[str] = []
    cell = view(limit=100, keep=stored.append)
    for i in range(50):
        cell.add(output(0, f"line {i}\n"))
    cell.close(Run(1), ("ended",))
    written = capsys.readouterr()
    assert "".join(stored) == written.out.split("…")[0] + "nbdist: ended\n"
    assert written.err == "nbdist: ended\n", "messages of nbdist are always shown"
    assert "line 3\n" in written.out


def report(rank: int, epoch: int, own: float, **shared: float) -> Metrics:
    return Metrics(
        rank=rank, cell=1, epoch=epoch, step=-1, time_s=1.0, own={"loss": own}, shared=shared
    )


def test_an_epoch_is_shown_after_the_reports_of_all_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = view()
    cell.add(report(0, 1, 1.0))
    cell.add(report(1, 1, 2.0))
    cell.flush()
    assert capsys.readouterr().out == ""
    cell.add(report(2, 1, 3.0))
    cell.flush()
    assert capsys.readouterr().out == "epoch 1  loss 2 [1 2 3]  1 s\n"


def test_a_reduced_value_is_shown_before_those_of_ranks() -> None:
    group = {0: report(0, 2, 1.0, loss=1.6, accuracy=0.5), 1: report(1, 2, 2.0, loss=1.6)}
    assert describe(group) == "epoch 2  loss 1.6 [1 2]  accuracy 0.5  1 s"


def test_a_metric_is_shown_as_a_table_by_rank() -> None:
    table = MetricTable([report(0, 1, 0.5), report(1, 1, 0.25), report(0, 2, 0.1)], "loss", "loss")
    assert table.lines()[1:] == [
        "rank  epoch 1  epoch 2",
        "----  -------  -------",
        "   0   0.5000   0.1000",
        "   1   0.2500",
    ]
    assert "<table" in table._repr_html_()


def test_ranks_places_and_memory_are_formatted() -> None:
    assert formatting.ranks([3, 1, 2, 0, 7]) == "0-3,7"
    assert formatting.places([1, 0], {0: "a", 1: "b"}) == "[0-1]"
    assert formatting.size(1.44e9) == "1.3 GiB"
